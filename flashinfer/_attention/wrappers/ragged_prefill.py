"""Prefill attention over ragged keys and values: ``BatchPrefillWithRaggedKVCacheWrapper``."""

from typing import Any, Literal, overload

import torch

from ..._common.checks import tensor as check_tensor
from ..._instrument.decorator import flashinfer_api, flashinfer_constructor
from ...trace.templates.attention import ragged_prefill_run_trace
from ..checks import BLACKWELL, check_pair_of_scales, refuse
from ..index_tensors import check_buffer, host_indices
from ..plan.requests import ArgumentNames, Requests
from .base import returning_lse
from .plan_arguments import PrefillArguments, takes_head_dim
from .prefill import PrefillWrapper


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    r"""Attention of a batch of queries over keys and values that lie one request after another.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        For partial results of requests that are split, contiguous, any dtype. Wrappers that run on
        different streams need workspaces of their own.
    kv_layout : str
        ``"NHD"``: keys are ``[tokens, num_kv_heads, head_dim_qk]``; ``"HND"``:
        ``[num_kv_heads, tokens, head_dim_qk]``. Queries are always of the former kind.
    use_cuda_graph : bool
        Whether ``run`` will be captured. One graph then serves every batch of up to
        ``len(qo_indptr_buf) - 1`` requests and as many query tokens as the first plan has.
    qo_indptr_buf, kv_indptr_buf : torch.Tensor
        With `use_cuda_graph`: int32 buffers on the device of ``capacity + 1`` elements. ``plan``
        fills them.
    custom_mask_buf, mask_indptr_buf : torch.Tensor, optional
        With `use_cuda_graph`, if every plan has a custom mask: uint8 of the most bytes that the
        packed masks of a batch take, and int32 of ``capacity + 1`` elements.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; see docs/attention.md.
    jit_args, jit_kwargs, variant_owns_mask
        As for ``BatchPrefillWithPagedKVCacheWrapper``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    >>> indptr = torch.tensor([0, 40, 57], dtype=torch.int32)
    >>> wrapper.plan(indptr, indptr, 32, 8, 128, causal=True)
    >>> q = torch.randn(57, 32, 128, dtype=torch.float16, device="cuda")
    >>> k, v = torch.randn(2, 57, 8, 128, dtype=torch.float16, device="cuda")
    >>> wrapper.run(q, k, v).shape
    torch.Size([57, 32, 128])
    """

    @flashinfer_constructor
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            custom_mask_buf,
            mask_indptr_buf,
            qo_indptr_buf,
            backend,
            jit_args,
            jit_kwargs,
            variant_owns_mask,
        )
        self._kv_indptr_buf = None
        if self._qo_indptr_buf is not None:
            self._kv_indptr_buf = check_buffer(
                "kv_indptr_buf",
                kv_indptr_buf,
                torch.int32,
                self.device,
                self._qo_indptr_buf.numel(),
            )

    @takes_head_dim
    @flashinfer_api
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        r"""Divide the work of a batch over the GPU.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``[batch_size + 1]``, int32 or int64: rows of `q` of each request. On the host nothing
            waits for the GPU; index tensors on the GPU are fetched by one copy.
        kv_indptr : torch.Tensor
            ``[batch_size + 1]``, int32 or int64: rows of `k` and `v` of each request.
        num_qo_heads, num_kv_heads : int
            The first a multiple of the second, up to 64 times.
        head_dim_qk : int
            A multiple of 16 from 16 to 512; beyond 256, of values one of 32.
        head_dim_vo : int, optional
            Head size of values and outputs; `head_dim_qk` by default.
        custom_mask : torch.Tensor, optional
            ``[sum of qo_len * kv_len]`` bool, or uint8 with 0 for False: for each request, row by
            row, which keys a query sees. Takes the place of `causal`. With CUDA graphs it may be
            longer; what is beyond the batch is not looked at.
        packed_custom_mask : torch.Tensor, optional
            The same as bits, uint8, each request beginning with a byte of its own, as
            ``segment_packbits(..., bitorder="little")`` packs them. Takes the place of
            `custom_mask`.
        causal : bool
            Query i of a request sees keys up to ``i + kv_len - qo_len``.
        pos_encoding_mode : str
            ``"NONE"``; ``"ROPE_LLAMA"``: rotate queries and keys in the kernel; ``"ALIBI"``.
        use_fp16_qk_reduction : bool
            Must be False: logits are summed in float32.
        sm_scale : float, optional
            Scale of the logits, ``1 / sqrt(head_dim_qk)`` by default.
        window_left : int
            How many keys before its own position a query sees; -1: all.
        logits_soft_cap : float, optional
            c of ``c * tanh(logits / c)``; None and 0: none.
        rope_scale, rope_theta : float, optional
            For ``"ROPE_LLAMA"``: positions are divided by the first (1), frequencies are powers of
            the second (10,000).
        q_data_type, kv_data_type, o_data_type : torch.dtype or str
            float16 or bfloat16; the same, float8_e4m3fn, float8_e5m2 or uint8 (pairs of 4 bits:
            NVFP4, head sizes that are multiples of 64) for keys and values. On
            Hopper also float8_e4m3fn for all three, with a 16-bit `o_data_type`.
            The default of the first is float16, and the others have the first's.
        non_blocking : bool
            False waits until the plan and a graph's buffers are on the GPU; else index tensors in
            pinned memory must stay as they are until then.
        prefix_len_ptr : torch.Tensor, optional
            Multi-item scoring: ``[batch_size]`` uint32 (int32 is taken for it), tokens of the
            prefix that all items of a request share. With the next three.
        token_pos_in_items_ptr : torch.Tensor, optional
            ``[batch_size * token_pos_in_items_len]`` uint16 (or int16): for the tokens after the
            prefix, their positions in their items; 0 for the delimiters between these.
        token_pos_in_items_len : int
            Entries of each request in it.
        max_item_len_ptr : torch.Tensor, optional
            ``[batch_size]`` uint16 (or int16): length of the longest item.
        fixed_split_size : int, optional
            Cut every request at multiples of this many keys (rounded up to 64) and nowhere else:
            a request's result then does not depend on the batch it is in. None or -1: wherever it
            is fastest.
        disable_split_kv : bool
            Cut no request, whatever `fixed_split_size` says; with it, a result still does not
            depend on the batch.
        seq_lens_q, max_token_per_sequence, max_sequence_kv, uniform_q_len : optional
            Query lengths, bounds of the lengths of queries and of keys, and the one length of all
            queries: nothing needs them, but they must be true.
        seq_lens : torch.Tensor, optional
            ``[batch_size]``: lengths of the keys; nothing needs them, but they must be true.
        v_indptr, o_indptr : None
            Must be None: values lie as keys do, outputs as queries.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, lengths contradict each other, a CUDA graph's
            capacity is exceeded, or a workspace is too small (the message says the bytes needed).
        """
        a = PrefillArguments(locals())
        refuse("values lie as keys do, outputs as queries", v_indptr=v_indptr, o_indptr=o_indptr)
        self._problem = None  # whatever becomes of this plan
        indptrs = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}
        if seq_lens is not None:
            indptrs["seq_lens"] = seq_lens
        host_qo, host_kv, *lengths = host_indices(indptrs)
        spec = self._prefill_spec(a)
        requests = Requests(
            ArgumentNames.RAGGED,
            host_qo,
            host_kv,
            causal=spec.causal,
            window_left=spec.window_left,
        )
        if lengths and not torch.equal(lengths[0], requests.kv_lengths()):
            raise ValueError("`seq_lens` must be the lengths that `kv_indptr` says")
        problem = self._prefill_problem(a, spec, requests)
        options = self._prefill_options(a, requests)
        self._plan(problem, options)
        self._copy_to_buffers(
            options,
            ("qo_indptr", qo_indptr, self._qo_indptr_buf),
            ("kv_indptr", kv_indptr, self._kv_indptr_buf),
        )

    begin_forward = plan

    @overload
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: Literal[False] = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    @overload
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: Literal[True],
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @flashinfer_api(trace=ragged_prefill_run_trace)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        r"""Attention of the planned batch for one layer.

        Parameters
        ----------
        q : torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; last dimension contiguous, rows at
            multiples of 16 bytes. With CUDA graphs it may have more rows; those beyond the plan
            are not computed.
        k, v : torch.Tensor
            ``[tokens, num_kv_heads, head_dim]``, or the first two dimensions exchanged for
            ``"HND"``, at least ``kv_indptr[-1]`` tokens; strides as for `q`.
        *args
            Additional tensors, then scalars, of `jit_args`; without these `q_scale`, `k_scale` and
            `v_scale`.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            As for ``BatchPrefillWithPagedKVCacheWrapper.run``.
        o_scale : None
            Must be None: outputs are not quantised.
        out : torch.Tensor, optional
            Where the output goes: ``[tokens, num_qo_heads, head_dim_vo]`` of `o_data_type`.
        lse, return_lse, lse_base, lse_layout, enable_pdl
            As for ``BatchPrefillWithPagedKVCacheWrapper.run``.
        kv_cache_sf : tuple of torch.Tensor, optional
            Scales of 4-bit keys and of values, as there, a row for each of their rows.
        sinks : torch.Tensor, optional
            ``[num_qo_heads]`` float32: a logit per head that takes part in the softmax without a
            value.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            Output and, with `return_lse`, log-sum-exps.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        refuse(BLACKWELL, o_scale=o_scale)
        check_tensor("v", v)
        check_pair_of_scales(kv_cache_sf)
        return self._launch_prefill(
            q,
            k,
            v,
            args,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            lse_layout=lse_layout,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            enable_pdl=enable_pdl,
            sinks=sinks,
            kv_cache_sf=kv_cache_sf,
        )

    run_return_lse = returning_lse(run)

    @flashinfer_api
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Deprecated: ``run`` with options that take the place of the plan's."""
        self._override_prefill(
            use_fp16_qk_reduction,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, k, v)

    @flashinfer_api
    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Deprecated: ``run_return_lse`` with options that take the place of the plan's."""
        self._override_prefill(
            use_fp16_qk_reduction,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, k, v, return_lse=True)
