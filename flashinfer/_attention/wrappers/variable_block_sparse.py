"""Attention over blocks of sizes of their own: ``VariableBlockSparseAttentionWrapper``."""

from typing import Literal, overload

import torch

from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._instrument.decorator import flashinfer_api
from ...jit.attention.config import FLOAT16
from ...trace.templates.sparse import (
    variable_block_sparse_attention_run_trace,
)
from ..checks import resolve_dtype
from .sparse import SparseWrapper, grouped, in_callers_order, in_place
from .sparse_checks import (
    check_result,
    check_shape,
    check_variable_blocks,
)
from .sparse_tables import (
    variable_block_table,
)


class VariableBlockSparseAttentionWrapper(SparseWrapper):
    """Attention whose logits are sparse in blocks of any sizes, for each KV head others.

    The matrix of KV head h, which all of its query heads share, has rows (queries) in blocks of
    ``block_row_sz[h]`` and columns (keys) in blocks of ``block_col_sz[h]``.

    Parameters
    ----------
    float_workspace_buffer, backend
        As for :class:`BlockSparseAttentionWrapper`.

    Raises
    ------
    TypeError, ValueError
        As for :class:`BlockSparseAttentionWrapper`.

    Notes
    -----
    Pages are as long as the greatest common divisor of all sizes of columns: sizes that are
    multiples of 16 make for a short page table. Queries of several heads per KV head are copied
    into the order that the kernel wants, and the results back.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace)
    >>> blocks = torch.rand(8, 4, 5) < 0.5
    >>> rows = torch.tensor([[10, 20, 30, 4]] * 8, dtype=torch.int32)
    >>> columns = torch.tensor([[16, 32, 16, 0, 64]] * 8, dtype=torch.int32)
    >>> wrapper.plan(blocks, rows, columns, 8, 8, 128)
    >>> q = torch.randn(8, 64, 128, dtype=torch.float16, device="cuda")
    >>> k, v = torch.randn(2, 8, 128, 128, dtype=torch.float16, device="cuda")
    >>> o = wrapper.run(q, k, v)
    """

    @flashinfer_api
    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Describe the matrices; any number of runs may follow.

        Parameters
        ----------
        block_mask_map : torch.Tensor
            Blocks that are attended to, ``[num_kv_heads, row_blocks, col_blocks]``, bool.
        block_row_sz, block_col_sz : torch.Tensor
            Sizes of the blocks, ``[num_kv_heads, row_blocks]`` and ``[num_kv_heads, col_blocks]``,
            int32 or int64, at least 0; for all heads of one sum, the numbers of queries and keys.
            The three are best on the CPU; the host waits for copies of others.
        num_qo_heads, num_kv_heads, head_dim : int
            As for :meth:`BlockSparseAttentionWrapper.plan`.
        causal : bool
            Whether row i attends to columns up to ``i + keys - queries`` only, of those that the
            blocks have.
        pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta
            As for :meth:`BlockSparseAttentionWrapper.plan`.
        non_blocking, q_data_type, kv_data_type
            As for :meth:`BlockSparseAttentionWrapper.plan`. The output has
            `q_data_type`, with 8-bit queries bfloat16.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`BlockSparseAttentionWrapper.plan`.
        """
        self._problem = None  # whatever becomes of this plan
        check_count("num_qo_heads", num_qo_heads)
        check_count("num_kv_heads", num_kv_heads)
        if num_qo_heads % num_kv_heads:
            raise ValueError(
                f"`num_qo_heads` must be a multiple of `num_kv_heads`, got {num_qo_heads} and "
                f"{num_kv_heads}"
            )
        is_16_bit = resolve_dtype("q_data_type", q_data_type) in FLOAT16
        # The heads' matrices follow each other: one KV head with the queries of its group.
        spec = self._sparse_spec(
            head_dim,
            pos_encoding_mode,
            use_fp16_qk_reduction,
            num_qo_heads=num_qo_heads // num_kv_heads,
            num_kv_heads=1,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=None if is_16_bit else torch.bfloat16,
        )
        causal = check_flag("causal", causal)
        blocks = check_variable_blocks(block_mask_map, block_row_sz, block_col_sz, num_kv_heads)
        table = variable_block_table(*blocks, causal, self.device)
        self._plan_table(spec, table, non_blocking)
        self._heads = num_qo_heads, num_kv_heads
        self._lengths = int(blocks[1][0].sum()), int(blocks[2][0].sum())
        self._blocks, self._causal = blocks, causal

    begin_forward = plan

    @overload
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
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
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        *,
        return_lse: Literal[True],
        enable_pdl: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @flashinfer_api(trace=variable_block_sparse_attention_run_trace)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned matrices.

        Parameters
        ----------
        q : torch.Tensor
            ``[num_qo_heads, queries, head_dim]``, dtype as planned; best contiguous.
        k, v : torch.Tensor
            ``[num_kv_heads, keys, head_dim]``, dtype as planned; copied if not contiguous.
        out : torch.Tensor, optional
            The result, ``[num_qo_heads, queries, head_dim]``, dtype of `q`; overlaps no input.
        lse : torch.Tensor, optional
            Log-sum-exp of the logits, base 2, ``[num_qo_heads, queries]``, float32; -inf for rows
            without a column. Written if it is given.
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
        check_flag("return_lse", return_lse)
        spec, requests, _ = self._planned_problem()
        (qo_heads, kv_heads), (queries, keys), dim = self._heads, self._lengths, spec.head_dim_qk
        check_shape("q", q, (qo_heads, queries, dim))
        for name, tensor in (("k", k), ("v", v)):
            check_shape(name, tensor, (kv_heads, keys, dim))
        check_result("out", out, (qo_heads, queries, dim), spec.o_data_type, q.device)
        check_result("lse", lse, (qo_heads, queries), torch.float32, q.device)
        page_size = requests.page_size
        pages = (kv_heads * keys // page_size, page_size, 1, dim)
        # Destinations in the order of the kernel, where that is a view of them.
        out_rows = None if out is None else in_place(out, kv_heads)
        lse_rows = None if lse is None else in_place(lse[..., None], kv_heads)
        own_out, own_lse = self._launch(
            grouped(q, kv_heads),
            k.reshape(pages),
            v.reshape(pages),
            out=out_rows,
            lse=None if lse_rows is None else lse_rows[..., 0],
            return_lse=True,
            enable_pdl=enable_pdl,
        )
        result = in_callers_order(own_out, out, self._heads)
        if not return_lse and lse is None:
            return result
        own_lse = own_lse[..., None]
        if lse is None:
            return result, in_callers_order(own_lse, None, self._heads)[..., 0]
        in_callers_order(own_lse, lse[..., None], self._heads)
        return (result, lse) if return_lse else result

    @flashinfer_api
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
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
        return self.run(q, k, v)
