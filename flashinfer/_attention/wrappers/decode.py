"""Decode attention of a batch: ``flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from ..._common.cache_layout import split_cache
from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._instrument.decorator import flashinfer_api, flashinfer_constructor
from ...jit.attention.config import CODES, check_codes
from ...trace.templates.attention import paged_decode_run_trace
from ..checks import BLACKWELL, check_spare_block_tables, refuse, with_data_type
from ..index_tensors import (
    check_buffer,
    check_page_numbers,
    copy_to_buffer,
    device_indices,
    host_page_table,
)
from ..plan.launch import GraphCapacity, PlanOptions
from ..plan.requests import ArgumentNames, AttentionProblem, PlanTensors, Requests
from ..plan.spec import AttentionSpec
from .base import AttentionWrapper, Cache, SpecArguments, returning_lse
from .paged import PagedWrapper
from .plan_arguments import DecodeArguments, decode_options, takes_arguments_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .run_options import DecodeRunOptions

_NAMES = ("qo_indptr", "indptr", "last_page_len")


class _Options(NamedTuple):
    """The options of a plan, checked."""

    spec: AttentionSpec
    page_size: int
    tokens_per_request: int
    plan: PlanOptions
    tensors: PlanTensors  # without page numbers


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper, AttentionWrapper):
    r"""Decode attention of a batch over a paged cache.

    ``plan`` looks at the lengths and divides the work over the GPU, ``run`` computes a layer; one
    plan serves every layer of a step.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        For partial results of requests that are split, contiguous, any dtype; 128 MiB are
        plenty, ``workspace_size`` says what a batch needs. Wrappers that run on different streams
        need workspaces of their own.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    use_cuda_graph : bool
        Whether ``run`` will be captured. One graph then serves every batch of up to
        ``len(paged_kv_last_page_len_buffer)`` requests and every length, by planning anew.
    use_tensor_cores : bool
        Accepted; there is one kernel, and it uses them.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : torch.Tensor
        With `use_cuda_graph`: int32 buffers on the device, of ``capacity + 1`` elements, of the
        most page numbers a batch can have, and of ``capacity``. ``plan`` fills them.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``, whose tiles are for prefill: with few query
        heads to a KV head most of their rows are empty.
    jit_args : list, optional
        A variant: ``[uri, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk, head_dim_vo,
        additional_tensor_names, additional_tensor_dtypes, additional_scalar_names,
        additional_scalar_dtypes, variant_name, variant_decl]``; the additional tensors, then
        scalars, follow the cache in ``run``. See docs/variants.md.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    >>> indptr = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> pages = torch.tensor([9, 1, 4, 0, 7], dtype=torch.int32, device="cuda")
    >>> last = torch.tensor([16, 3], dtype=torch.int32)
    >>> wrapper.plan(indptr, pages, last, 32, 8, 128, 16, q_data_type=torch.bfloat16)
    >>> cache = torch.randn(10, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> q = torch.randn(2, 32, 128, dtype=torch.bfloat16, device="cuda")
    >>> wrapper.run(q, cache).shape
    torch.Size([2, 32, 128])
    """

    _makes_codes = True

    @flashinfer_constructor
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        check_flag("use_tensor_cores", use_tensor_cores)
        self._paged_kv_indptr_buf: torch.Tensor | None = None
        self._paged_kv_indices_buf: torch.Tensor | None = None
        self._paged_kv_last_page_len_buf: torch.Tensor | None = None
        if not use_cuda_graph:
            return
        name = "paged_kv_last_page_len_buffer"
        last = check_buffer(name, paged_kv_last_page_len_buffer, torch.int32, self.device)
        self._paged_kv_last_page_len_buf = last
        self._paged_kv_indptr_buf = check_buffer(
            "paged_kv_indptr_buffer",
            paged_kv_indptr_buffer,
            torch.int32,
            self.device,
            last.numel() + 1,
        )
        self._paged_kv_indices_buf = check_buffer(
            "paged_kv_indices_buffer", paged_kv_indices_buffer, torch.int32, self.device
        )

    @property
    def use_tensor_cores(self) -> bool:
        """True: the kernel uses them whatever was asked for."""
        return True

    @flashinfer_api
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        r"""Divide the work of a batch over the GPU.

        Parameters
        ----------
        indptr : torch.Tensor
            ``[batch_size + 1]``, int32 or int64: request b has the pages
            ``indices[indptr[b] : indptr[b + 1]]``. On the host nothing waits for the GPU; index
            tensors on the GPU are fetched by one copy.
        indices : torch.Tensor
            Page numbers, int32 or int64; used where it lies if it is int32 on the device.
        last_page_len : torch.Tensor
            ``[batch_size]``, int32 or int64: tokens in each request's last page.
        num_qo_heads, num_kv_heads : int
            The first a multiple of the second, up to 64 times.
        head_dim : int
            A multiple of 16 from 16 to 512; beyond 256, of values one of 32.
        page_size : int
            Tokens of a page, any number from 1.
        pos_encoding_mode : str
            ``"NONE"``; ``"ROPE_LLAMA"``: rotate queries and keys in the kernel; ``"ALIBI"``.
        window_left : int
            How many keys before the query's own are seen; -1: all.
        logits_soft_cap : float, optional
            c of ``c * tanh(logits / c)``; None and 0: none.
        q_data_type, kv_data_type, o_data_type : torch.dtype or str
            float16, bfloat16, float8_e4m3fn or float8_e5m2; the same or one of 8 bits for the
            cache, with 16-bit queries also uint8 (4 bits: NVFP4); 16 bits for the output, or
            float8_e4m3fn with `out_scale` of ``run``, for heads of 128 and at most 16 query rows of
            a request to a KV head. The default of the first is float16, the others have the
            first's, so that 8-bit queries need an `o_data_type`.
        data_type : torch.dtype or str, optional
            Stands in for those of `q_data_type` and `kv_data_type` that are left out; one of 8 bits
            is the cache's alone.
        sm_scale : float, optional
            Scale of the logits, ``1 / sqrt(head_dim)`` by default.
        rope_scale, rope_theta : float, optional
            For ``"ROPE_LLAMA"``: positions are divided by the first (1), frequencies are powers of
            the second (10,000).
        non_blocking : bool
            False waits until the plan and a graph's buffers are on the GPU; else index tensors in
            pinned memory must stay as they are until then.
        seq_lens : torch.Tensor, optional
            ``[batch_size]``: lengths in tokens. On the host, with `last_page_len` on the GPU, they
            spare fetching it; given both on the host, they must agree.
        fixed_split_size : int, optional
            Cut every request at multiples of this many tokens (rounded up to 64) and nowhere else:
            a request's result then does not depend on the batch it is in. None or -1: wherever it
            is fastest.
        disable_split_kv : bool
            Cut no request, whatever `fixed_split_size` says; with it, a result still does not
            depend on the batch.
        q_len_per_req : int
            Query tokens of each request, 1 by default; of several, each sees the keys up to its
            own, the last of them all.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, lengths contradict the page table, a CUDA graph's
            capacity is exceeded, or a workspace is too small (the message says the bytes needed).
        """
        arguments = DecodeArguments(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            *deprecated_positional_args,
            **kwargs,
        )
        self._plan_decode(arguments)

    begin_forward = plan

    def _plan_decode(self, a: DecodeArguments) -> None:
        self._problem = None  # whatever becomes of this plan
        problem, options = self._problem_of(a)
        buffer = self._paged_kv_indices_buf
        if buffer is None:
            pages = device_indices("indices", a.indices, self.device)
        else:
            pages = check_page_numbers("indices", a.indices, buffer, problem.requests.kv_indptr)
        tensors = problem.tensors._replace(kv_indices=pages)
        self._plan(AttentionProblem(problem.spec, problem.requests, tensors), options)
        if buffer is not None:
            assert self._paged_kv_indptr_buf is not None
            assert self._paged_kv_last_page_len_buf is not None
            wait = options.non_blocking
            copy_to_buffer("indices", a.indices, buffer, wait)
            copy_to_buffer("indptr", a.indptr, self._paged_kv_indptr_buf, wait)
            last_page_len = self._paged_kv_last_page_len_buf
            copy_to_buffer("last_page_len", a.last_page_len, last_page_len, wait)

    def _problem_of(self, a: DecodeArguments) -> tuple[AttentionProblem, PlanOptions]:
        """The problem of a plan, without page numbers, and how it is divided."""
        if a.block_tables is not None:
            check_spare_block_tables(a.block_tables)
        options = self._remembered(decode_options(a), lambda: self._checked_options(a))
        _, indptr, kv_len, last = host_page_table(
            None, a.indptr, a.last_page_len, a.seq_lens, options.page_size, _NAMES
        )
        spec = options.spec
        requests = Requests(
            ArgumentNames.DECODE,
            None,
            indptr,
            kv_len,
            last,
            options.page_size,
            options.tokens_per_request,
            spec.causal,
            spec.window_left,
        )
        return AttentionProblem(spec, requests, options.tensors), options.plan

    def _checked_options(self, a: DecodeArguments) -> _Options:
        q_data_type, kv_data_type = with_data_type(a.q_data_type, a.kv_data_type, a.data_type)
        page_size = check_count("page_size", a.page_size)
        tokens = check_count("q_len_per_req", a.q_len_per_req)
        spec = self._checked_spec(
            SpecArguments(
                num_qo_heads=a.num_qo_heads,
                num_kv_heads=a.num_kv_heads,
                head_dim_qk=a.head_dim,
                head_dim_vo=a.head_dim,
                pos_encoding_mode=a.pos_encoding_mode,
                window_left=a.window_left,
                logits_soft_cap=a.logits_soft_cap,
                sm_scale=a.sm_scale,
                rope_scale=a.rope_scale,
                rope_theta=a.rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                o_data_type=a.o_data_type,
                causal=tokens > 1,
            )
        )
        if spec.o_data_type == CODES:
            check_codes(spec.head_dim_vo, tokens * spec.group_size)
        plan = self._check_plan_options(a.fixed_split_size, a.disable_split_kv, a.non_blocking)
        if self._paged_kv_last_page_len_buf is not None:
            batch_size = self._paged_kv_last_page_len_buf.numel()
            plan = plan._replace(capacity=GraphCapacity(batch_size, batch_size * tokens))
        tensors = PlanTensors(alibi_slopes=self._alibi_slopes(spec))
        return _Options(spec, page_size, tokens, plan, tensors)

    @takes_arguments_of(DecodeArguments, without="non_blocking")
    def workspace_size(self, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of workspace that ``plan`` with these arguments needs, exactly.

        Returns
        -------
        tuple of int
            Bytes of the float workspace and of the int workspace.
        """
        problem, options = self._problem_of(DecodeArguments(**arguments))
        return self._executor.workspace_size(problem, options)

    @overload
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        return_lse: Literal[False] = False,
        **options: "Unpack[DecodeRunOptions]",
    ) -> torch.Tensor: ...
    @overload
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        return_lse: Literal[True],
        **options: "Unpack[DecodeRunOptions]",
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        return_lse: bool,
        **options: "Unpack[DecodeRunOptions]",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @flashinfer_api(trace=paged_decode_run_trace)
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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
        out_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        r"""Attention of the planned batch for one layer.

        Parameters
        ----------
        q : torch.Tensor
            ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``; last dimension contiguous,
            rows at multiples of 16 bytes. With CUDA graphs it may have more rows; those beyond the
            plan are not computed.
        paged_kv_cache : torch.Tensor or tuple of torch.Tensor
            Keys and values, each ``[num_pages, page_size, num_kv_heads, head_dim]`` (``"NHD"``) or
            ``[num_pages, num_kv_heads, page_size, head_dim]`` (``"HND"``), or one tensor with a
            dimension of 2 after the first; pages of one token need no dimension for it. Last
            dimension contiguous, rows at multiples of 16 bytes, other strides free.
        *args
            Additional tensors, then scalars, of `jit_args`; without these `q_scale`, `k_scale` and
            `v_scale`.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            As for ``BatchPrefillWithPagedKVCacheWrapper.run``.
        out : torch.Tensor, optional
            Where the output goes: shape of `q` with `o_data_type`.
        lse : torch.Tensor, optional
            Where the log-sum-exps go: ``[tokens, num_qo_heads]`` float32, contiguous.
        return_lse : bool
            Whether they are returned.
        enable_pdl : bool, optional
            Programmatic dependent launch; None: where the device has it.
        window_left : int, optional
            A window for this layer, within the planned one.
        sinks : torch.Tensor, optional
            ``[num_qo_heads]`` float32: a logit per head, in the softmax without a value.
        q_len_per_req : int, optional
            The planned number, or None.
        kv_cache_sf : torch.Tensor or tuple of torch.Tensor, optional
            As for ``BatchPrefillWithPagedKVCacheWrapper.run``.
        out_scale : torch.Tensor, optional
            ``[tokens, num_qo_heads]``, float32, any strides; for, and only for, an `o_data_type` of
            float8_e4m3fn. Receives the factors of the codes of a token's head.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            Output and, with `return_lse`, log-sum-exps (base 2).

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        if skip_softmax_threshold_scale_factor is not None:
            refuse(
                BLACKWELL,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            )
        planned = 1 if self._problem is None else self._problem.requests.tokens_per_request
        if q_len_per_req not in (None, planned):
            raise ValueError(f"`q_len_per_req` must be {planned} as in plan(), got {q_len_per_req}")
        k, v = split_cache(paged_kv_cache)
        try:
            return self._launch(
                q,
                k,
                v,
                args,
                out=out,
                lse=lse,
                return_lse=return_lse,
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
                window_left=window_left,
                sinks=sinks,
                enable_pdl=enable_pdl,
                kv_cache_sf=kv_cache_sf,
                out_scale=out_scale,
            )
        except ValueError as error:
            raise self._explained(error, q) from None

    run_return_lse = returning_lse(run)

    def _explained(self, error: ValueError, q: torch.Tensor) -> ValueError:
        """An error, with where the number of tokens comes from if `q` has another."""
        requests = None if self._problem is None else self._problem.requests
        if requests is None or q.shape[:1] == (requests.num_qo_tokens,):
            return error
        return ValueError(
            f"{error}: {requests.batch_size} requests were planned with `q_len_per_req` of "
            f"{requests.tokens_per_request}"
        )

    @flashinfer_api
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Deprecated: ``run`` with options that take the place of the plan's."""
        self._override(
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    @flashinfer_api
    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Deprecated: ``run_return_lse`` with options that take the place of the plan's."""
        self._override(
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run_return_lse(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
        )
