"""Prefill attention of a batch over pages: ``BatchPrefillWithPagedKVCacheWrapper``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..._common.cache_layout import split_cache
from ..._common.checks import count as check_count
from ..._instrument.decorator import flashinfer_api, flashinfer_constructor
from ...trace.templates.attention import paged_prefill_run_trace
from ..checks import BLACKWELL, check_spare_block_tables, refuse
from ..index_tensors import check_buffer, check_page_numbers, device_indices, host_page_table
from ..plan.requests import ArgumentNames, AttentionProblem, Requests
from .base import Cache, returning_lse
from .cached_module import planned_module
from .paged import PagedWrapper
from .plan_arguments import PagedArguments, takes_arguments_of, takes_head_dim
from .prefill import PrefillWrapper

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .run_options import PrefillRunOptions

_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len")


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper, PrefillWrapper):
    r"""Attention of a batch of queries over a paged cache.

    ``plan`` looks at the lengths and divides the work over the GPU, ``run`` computes a layer; one
    plan serves every layer of a step.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        For partial results of requests that are split, contiguous, any dtype; 128 MiB are
        plenty, ``workspace_size`` says what a batch needs. What is left may hold copies of keys
        (docs/attention.md, Hopper). Wrappers that run on different streams need workspaces of
        their own.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    use_cuda_graph : bool
        Whether ``run`` will be captured. One graph then serves every batch of up to
        ``len(qo_indptr_buf) - 1`` requests and as many query tokens as the first plan has, and
        every length of keys, by planning anew.
    qo_indptr_buf, paged_kv_indptr_buf : torch.Tensor
        With `use_cuda_graph`: int32 buffers on the device, of ``capacity + 1`` elements. ``plan``
        fills them and the next two.
    paged_kv_indices_buf, paged_kv_last_page_len_buf : torch.Tensor
        As these, of the most page numbers of a batch, and of ``capacity`` elements.
    custom_mask_buf, mask_indptr_buf : torch.Tensor, optional
        With `use_cuda_graph`, if every plan has a custom mask: uint8 of the most bytes that the
        packed masks of a batch take, and int32 of ``capacity + 1`` elements.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; see docs/attention.md.
    jit_args : list, optional
        A variant: ``[uri, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk, head_dim_vo,
        additional_tensor_names, additional_tensor_dtypes, additional_scalar_names,
        additional_scalar_dtypes, variant_name, variant_decl]``; the additional tensors, then
        scalars, follow the cache in ``run``. See docs/variants.md.
    jit_kwargs : dict, optional
        ``pos_encoding_mode`` (0, or 1 to rotate queries and keys) and ``use_sliding_window``.
    variant_owns_mask : bool
        With `jit_args`: no key is left out but by the variant's LogitsMask.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
    >>> qo_indptr = torch.tensor([0, 40, 57], dtype=torch.int32)
    >>> kv_indptr = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> pages = torch.tensor([9, 1, 4, 0, 7], dtype=torch.int32, device="cuda")
    >>> last = torch.tensor([16, 3], dtype=torch.int32)
    >>> wrapper.plan(qo_indptr, kv_indptr, pages, last, 32, 8, 128, 16, causal=True)
    >>> cache = torch.randn(10, 2, 16, 8, 128, dtype=torch.float16, device="cuda")
    >>> q = torch.randn(57, 32, 128, dtype=torch.float16, device="cuda")
    >>> wrapper.run(q, cache).shape
    torch.Size([57, 32, 128])
    """

    @flashinfer_constructor
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
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
        self._paged_kv_indptr_buf = self._paged_kv_indices_buf = None
        self._paged_kv_last_page_len_buf = None
        if self._qo_indptr_buf is None:
            return
        length = self._qo_indptr_buf.numel()
        int32, device = torch.int32, self.device
        name = "paged_kv_indptr_buf"
        self._paged_kv_indptr_buf = check_buffer(name, paged_kv_indptr_buf, int32, device, length)
        name = "paged_kv_indices_buf"
        self._paged_kv_indices_buf = check_buffer(name, paged_kv_indices_buf, int32, device)
        name = "paged_kv_last_page_len_buf"
        self._paged_kv_last_page_len_buf = check_buffer(
            name, paged_kv_last_page_len_buf, int32, device, length - 1
        )

    @takes_head_dim
    @flashinfer_api
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
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
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        r"""Divide the work of a batch over the GPU.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``[batch_size + 1]``, int32 or int64: rows of `q` of each request. On the host nothing
            waits for the GPU; index tensors on the GPU are fetched by one copy.
        paged_kv_indptr : torch.Tensor
            ``[batch_size + 1]``, int32 or int64: request b has the pages
            ``paged_kv_indices[paged_kv_indptr[b] : paged_kv_indptr[b + 1]]``.
        paged_kv_indices : torch.Tensor
            Page numbers, int32 or int64; used where it lies if it is int32 on the device.
        paged_kv_last_page_len : torch.Tensor
            ``[batch_size]``, int32 or int64: tokens in each request's last page.
        num_qo_heads, num_kv_heads : int
            The first a multiple of the second, up to 64 times.
        head_dim_qk : int
            A multiple of 16 from 16 to 512; beyond 256, of values one of 32.
        page_size : int
            Tokens of a page, any number from 1.
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
            float16 or bfloat16; for keys and values the same, float8_e4m3fn, float8_e5m2 or uint8
            (4 bits). On Hopper also float8_e4m3fn for all three, with a 16-bit output. The default
            of the first is float16; the others have the first's.
        non_blocking : bool
            False waits until the plan and a graph's buffers are on the GPU; else index tensors in
            pinned memory must stay as they are until then.
        prefix_len_ptr : torch.Tensor, optional
            Multi-item scoring: ``[batch_size]`` uint32 (int32 is taken for it), tokens of the
            prefix that all items of a request share. With the next three. Any shape.
        token_pos_in_items_ptr : torch.Tensor, optional
            ``[batch_size * token_pos_in_items_len]`` uint16 (or int16): for the tokens after the
            prefix, their positions in their items; 0 for the delimiters between these.
        token_pos_in_items_len : int
            Entries of each request in it.
        max_item_len_ptr : torch.Tensor, optional
            ``[batch_size]`` uint16 (or int16): length of the longest item.
        seq_lens : torch.Tensor, optional
            ``[batch_size]``: lengths in tokens. On the host, with `paged_kv_last_page_len` on the
            GPU, they spare fetching it; given both on the host, they must agree.
        block_tables : torch.Tensor, optional
            Not read: the index tensors say which pages there are.
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

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, lengths contradict each other, a CUDA graph's
            capacity is exceeded, or a workspace is too small (the message says the bytes needed).
        """
        a = PagedArguments(locals())
        self._problem = None  # whatever becomes of this plan
        spec, requests, tensors = self._paged_problem(a)
        name, buffer = "paged_kv_indices", self._paged_kv_indices_buf
        if buffer is None:
            pages = device_indices(name, paged_kv_indices, self.device)
        else:
            pages = check_page_numbers(name, paged_kv_indices, buffer, requests.kv_indptr)
        options = self._prefill_options(a, requests)
        tensors = tensors._replace(kv_indices=pages)
        self._plan(AttentionProblem(spec, requests, tensors), options)
        last_page_len = paged_kv_last_page_len
        self._copy_to_buffers(
            options,
            (name, paged_kv_indices, buffer),
            ("qo_indptr", qo_indptr, self._qo_indptr_buf),
            ("paged_kv_indptr", paged_kv_indptr, self._paged_kv_indptr_buf),
            ("paged_kv_last_page_len", last_page_len, self._paged_kv_last_page_len_buf),
        )

    begin_forward = plan
    _cached_module = property(planned_module)

    @takes_arguments_of(plan, without="non_blocking")
    def workspace_size(self, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of workspace that ``plan`` with these arguments needs, exactly.

        Returns
        -------
        tuple of int
            Bytes of the float workspace and of the int workspace.
        """
        a = PagedArguments(arguments)
        problem = self._paged_problem(a)
        return self._executor.workspace_size(problem, self._prefill_options(a, problem.requests))

    def _paged_problem(self, a: PagedArguments) -> AttentionProblem:
        """The problem of a plan, without page numbers."""
        check_spare_block_tables(a.block_tables)
        page_size = check_count("page_size", a.page_size)
        if a.qo_indptr is None:
            raise TypeError("`qo_indptr` must be a torch.Tensor, got NoneType")
        last_page_len = a.paged_kv_last_page_len
        qo_indptr, indptr, kv_len, last = host_page_table(
            a.qo_indptr, a.paged_kv_indptr, last_page_len, a.seq_lens, page_size, _NAMES
        )
        spec = self._prefill_spec(a)
        requests = Requests(
            ArgumentNames.PREFILL,
            qo_indptr,
            indptr,
            kv_len,
            last,
            page_size,
            causal=spec.causal,
            window_left=spec.window_left,
        )
        return self._prefill_problem(a, spec, requests)

    @overload
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        return_lse: Literal[False] = False,
        **options: "Unpack[PrefillRunOptions]",
    ) -> torch.Tensor: ...
    @overload
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        return_lse: Literal[True],
        **options: "Unpack[PrefillRunOptions]",
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        return_lse: bool,
        **options: "Unpack[PrefillRunOptions]",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @flashinfer_api(trace=paged_prefill_run_trace)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        r"""Attention of the planned batch for one layer.

        Parameters
        ----------
        q : torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; last dimension contiguous, rows at
            multiples of 16 bytes. With CUDA graphs it may have more rows; those beyond the plan
            are not computed.
        paged_kv_cache : torch.Tensor or tuple of torch.Tensor
            Keys and values, each ``[num_pages, page_size, num_kv_heads, head_dim]`` (``"NHD"``) or
            ``[num_pages, num_kv_heads, page_size, head_dim]`` (``"HND"``), or one tensor with a
            dimension of 2 after the first; pages of one token need no dimension for it. Last
            dimension contiguous, rows at multiples of 16 bytes, other strides free.
        *args
            Additional tensors, then scalars, of `jit_args`; without these `q_scale`, `k_scale` and
            `v_scale`.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            Scales of quantised tensors: the first two multiply
            the logits, the last the output. A number (also a tensor of one on the CPU), or float32
            on the device of `q`, which the host does not wait for and a CUDA graph reads at each
            replay: ``[num_qo_heads]`` for queries, ``[num_kv_heads]`` for keys and values, or one
            value for all heads. Values on the device must be positive.
        out : torch.Tensor, optional
            Where the output goes: ``[tokens, num_qo_heads, head_dim_vo]`` of `o_data_type`.
        lse : torch.Tensor, optional
            Where the log-sum-exps go, float32: shape by `lse_layout`, contiguous.
        return_lse : bool
            Whether they are returned.
        lse_base : {"log2", "ln"}
            Base 2 costs nothing; the natural logarithm is converted by a kernel more.
        lse_layout : {"NH", "HN"}
            ``[tokens, num_qo_heads]``; or transposed, by a kernel more.
        enable_pdl : bool, optional
            Programmatic dependent launch; None: where the device has it.
        window_left : int, optional
            A window for this layer, within the planned one.
        sinks : torch.Tensor, optional
            ``[num_qo_heads]`` float32: a logit per head of the softmax, without a value.
        kv_cache_sf : torch.Tensor or tuple of torch.Tensor, optional
            Scales of a 4-bit cache, in its form; docs/attention.md describes both.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            Output and, with `return_lse`, log-sum-exps.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        refuse(
            BLACKWELL,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
        k, v = split_cache(paged_kv_cache)
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
            window_left=window_left,
            sinks=sinks,
            enable_pdl=enable_pdl,
            kv_cache_sf=kv_cache_sf,
        )

    run_return_lse = returning_lse(run)

    @flashinfer_api
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
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
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    @flashinfer_api
    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
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
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)
