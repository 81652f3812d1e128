"""Attention whose matrix of logits is sparse in blocks.

Both wrappers describe a row of blocks to the kernels as a request whose pages are the blocks that
the row attends to; what is not attended to is neither read nor computed.
"""

from typing import Any, Literal, overload

import torch

from ..._common.checks import flag as check_flag
from ..._instrument.decorator import flashinfer_api
from ...trace.templates.sparse import (
    block_sparse_attention_run_trace,
)
from ..checks import BLACKWELL, refuse
from .sparse import SparseWrapper
from .sparse_checks import (
    check_bsr,
    check_mask,
    check_scales,
    check_shape,
)
from .sparse_tables import (
    bits_by_row_of_blocks,
    bsr_table,
)


class BlockSparseAttentionWrapper(SparseWrapper):
    r"""Attention whose logits are a matrix in block compressed sparse rows (BSR).

    The matrix has M rows (queries) and N columns (keys), in blocks of R by C. Row of blocks ``i``
    attends to the columns of blocks ``indices[indptr[i] : indptr[i + 1]]``, all heads alike.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        For partial results of rows that are split over several CTAs; contiguous, any dtype, on the
        GPU. 128 MiB suffice for every matrix.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; see docs/attention.md.

    Raises
    ------
    TypeError, ValueError
        If `float_workspace_buffer` is not such a tensor, or `backend` is another one.

    Notes
    -----
    Z. Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference
    Serving", 2025, section 3.1: block-sparse rows and page tables are one format.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.BlockSparseAttentionWrapper(workspace)
    >>> indptr = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    >>> indices = torch.tensor([0, 1, 2, 1, 3], dtype=torch.int32)
    >>> wrapper.plan(indptr, indices, 48, 64, 16, 16, 32, 8, 128)
    >>> q = torch.randn(48, 32, 128, dtype=torch.float16, device="cuda")
    >>> k, v = torch.randn(2, 64, 8, 128, dtype=torch.float16, device="cuda")
    >>> o = wrapper.run(q, k, v)
    """

    @flashinfer_api
    def plan(
        self,
        indptr: torch.Tensor | None,
        indices: torch.Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16",
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
        kv_block_lens: torch.Tensor | None = None,
        q2k_indices: torch.Tensor | None = None,
        q2k_num: torch.Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Describe the matrix; any number of runs may follow.

        Parameters
        ----------
        indptr : torch.Tensor
            First block of each row of blocks, ``[M / R + 1]``, int32 or int64, from 0 on and not
            decreasing. On the CPU, or the host waits for a copy.
        indices : torch.Tensor
            Column of each block, in blocks, at least ``indptr[-1]`` of them, int32 or int64, 0 to
            ``N / C - 1``. A row may be empty: its output is 0.
        M, N : int
            Rows and columns of the matrix; multiples of R and C.
        R, C : int
            Rows and columns of a block.
        num_qo_heads, num_kv_heads : int
            Heads; the first is 1 to 64 times the second.
        head_dim : int
            Elements of a head: a multiple of 16 from 16 to 256, or of 32 up to 512.
        mask : torch.Tensor, optional
            Entries of the blocks that count, ``[nnz, R, C]``, bool.
        packed_mask : torch.Tensor, optional
            The same as bits: what `segment_packbits` (little-endian, each row of blocks from a new
            byte on) makes of :func:`convert_bsr_mask_layout`; uint8. Takes the place of `mask`.
        causal : bool
            Whether row i attends to columns up to ``i + N - M`` only, of those that the blocks
            have. Not with a mask, which can say so itself.
        pos_encoding_mode : str
            ``"NONE"``: the kernel does not know the place of a key in the matrix.
        use_fp16_qk_reduction : bool
            False: sums are in float32.
        logits_soft_cap : float, optional
            c: logits become ``c * tanh(logits / c)``. None or 0: they do not.
        sm_scale : float, optional
            Factor of the logits; ``1 / sqrt(head_dim)`` by default.
        rope_scale, rope_theta : float, optional
            Without effect, as there are no rotary embeddings.
        q_data_type : str or torch.dtype
            float16, bfloat16, float8_e4m3fn or float8_e5m2.
        kv_data_type : str or torch.dtype, optional
            `q_data_type` (the default), float8_e4m3fn or float8_e5m2.
        o_data_type : str or torch.dtype
            Of the output: float16 (the default, whatever the queries have) or bfloat16.
        non_blocking : bool
            Whether to return before the work list is on the GPU; later work on the stream waits
            for it either way.
        block_mask, kv_block_lens, q2k_indices, q2k_num, kv_splits, use_clc : None
            These belong to kernels for Blackwell.
        q_scale, k_scale, v_scale : torch.Tensor, optional
            Factors of `q`, `k` and `v` for runs that have no others: float32 on the device, of each
            head or one, or a number.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as listed above, naming it; if the workspace is too small, with
            the bytes that it needs.
        """
        self._problem = None  # whatever becomes of this plan
        refuse(
            BLACKWELL,
            block_mask=block_mask,
            kv_block_lens=kv_block_lens,
            q2k_indices=q2k_indices,
            q2k_num=q2k_num,
            kv_splits=kv_splits,
            use_clc=use_clc,
        )
        spec = self._sparse_spec(
            head_dim,
            pos_encoding_mode,
            use_fp16_qk_reduction,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
        )
        scales = (q_scale, k_scale, v_scale)
        check_scales(spec, self.device, scales, ("q_scale", "k_scale", "v_scale"))
        causal = check_flag("causal", causal)
        if causal and (mask is not None or packed_mask is not None):
            raise ValueError("`causal` must be False with a mask, which can leave out columns")
        rows, columns, (M, N, R, C) = check_bsr(indptr, indices, M, N, R, C)
        table = bsr_table(rows, columns, (M, N), (R, C), causal, self.device)
        bits = None
        if mask is not None and packed_mask is None:
            check_mask(mask, int(rows[-1]), R, C)
            bits = bits_by_row_of_blocks(mask, rows)
        self._plan_table(spec, table, non_blocking, bits, packed_mask)
        self._shape, self._block = (M, N), (R, C)
        self._blocks, self._causal = (rows, columns), causal
        self._planned_scales = scales

    begin_forward = plan

    def _scales_of_run(self, *given: Any) -> tuple[Any, ...]:
        """Those of the run, else those of the plan."""
        pairs = zip(self._planned_scales, given, strict=True)
        return tuple(planned if scale is None else scale for planned, scale in pairs)

    @overload
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: Literal[False] = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor: ...
    @overload
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        *,
        return_lse: Literal[True],
        enable_pdl: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @flashinfer_api(trace=block_sparse_attention_run_trace)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned matrix.

        Parameters
        ----------
        q : torch.Tensor
            ``[M, num_qo_heads, head_dim]``, dtype as planned, last dimension contiguous, rows at
            multiples of 16 bytes.
        k, v : torch.Tensor
            ``[N, num_kv_heads, head_dim]``, dtype as planned; strides as for `q`.
        scale_q, scale_k, scale_v : torch.Tensor, optional
            Factors of `q`, `k` and `v`: float32 on the device, of each head or one, or a number;
            by default the plan's.
        out : torch.Tensor, optional
            The result; shape and strides as for `q`; overlaps no input.
        lse : torch.Tensor, optional
            Log-sum-exp of the logits, base 2, ``[M, num_qo_heads]``, float32, contiguous; -inf for
            rows without a column. Written if it is given.
        return_lse : bool
            Whether to return it, too.
        enable_pdl : bool, optional
            Programmatic dependent launch; None: where the GPU has it.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            `out`, or `out` and `lse`.

        Raises
        ------
        TypeError, ValueError
            If nothing is planned, or a tensor is not as planned or not on the GPU.
        """
        spec = self._planned_problem().spec
        (_, N), (_, C) = self._shape, self._block
        shape = (N, spec.num_kv_heads, spec.head_dim_qk)
        check_shape("k", k, shape)
        check_shape("v", v, shape)
        k, v = k.unflatten(0, (N // C, C)), v.unflatten(0, (N // C, C))
        given = (scale_q, scale_k, scale_v)
        check_scales(spec, self.device, given, ("scale_q", "scale_k", "scale_v"))
        q_scale, k_scale, v_scale = self._scales_of_run(*given)
        return self._launch(
            q,
            k,
            v,
            out=out,
            lse=lse,
            return_lse=return_lse,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            enable_pdl=enable_pdl,
        )

    @flashinfer_api
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Deprecated: ``run`` with options that take the place of the plan's."""
        self._override_sparse(
            pos_encoding_mode,
            use_fp16_qk_reduction,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, k, v, scale_q, scale_k, scale_v)
