"""``BatchMLAPagedAttentionWrapper``: absorbed latent attention over a paged cache."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from .._attention.checks import check_backend
from .._attention.index_tensors import check_buffer, check_page_numbers, copy_to_buffer
from .._common.checks import flag as check_flag
from .._common.checks import optional_flag as check_optional_flag
from .._common.checks import tensor as check_tensor
from .._common.driver import get_stream_sm_count
from .._compile.handles import Planned
from .._instrument.decorator import flashinfer_api, flashinfer_constructor
from ..jit.attention.mla import MlaPlanner, get_mla_module_of
from ..trace.templates.mla import mla_run_trace
from .call import CallModes, MlaCall, read_call, read_call_modes, refuse_modes
from .metadata import MLAPlanMetadata
from .module import PlannedModule, planner_if_any, without_gpu
from .problem import MlaBatch, MlaOptions, place_indices, read_batch, read_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._attention.wrappers.run_options import MLARunOptions

INT_WORKSPACE_BYTES = 8 << 20
"""Work lists of some 260,000 tiles of 64 query rows."""

_LN_2 = math.log(2.0)


class BatchMLAPagedAttentionWrapper(Planned):
    r"""Multi-head latent attention of a batch, in its absorbed form, over a paged cache.

    All query heads share one latent vector ``ckv`` per token, which is the value and most of the
    key, and one rotary part ``kpe``:

    .. math:: out = softmax(sm\_scale (q_{nope} ckv^T + q_{pe} kpe^T)) ckv

    ``plan`` looks at the lengths and divides the work over the GPU, ``run`` computes a layer; one
    plan serves every layer of a step. Requests may have one query token (decode), a few
    (speculative decoding) or many (prefill over a cache).

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        For partial results of requests that are split, contiguous, any dtype; 128 MiB are plenty.
        Wrappers that run on different streams need workspaces of their own.
    use_cuda_graph : bool
        Whether ``run`` will be captured. One graph then serves every batch that fits the buffers
        and the captured tensors, by planning anew.
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : torch.Tensor, optional
        With `use_cuda_graph`: int32 buffers on the device, of ``capacity + 1`` elements, the same,
        of the most page numbers a batch can have, and of ``capacity``. ``plan`` fills them.
    backend : str
        ``"fa2"``: for every GPU, ``"fa3"``: for Hopper, ``"auto"``: the latter on a Hopper.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
    Model", 2024, section 2.1: ``q_nope`` is the query multiplied by the up-projection of keys, and
    the caller multiplies the output by that of values.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)
    >>> qo_indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    >>> kv_indptr = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> pages = torch.tensor([9, 1, 4, 0, 7], dtype=torch.int32, device="cuda")
    >>> lengths = torch.tensor([150, 100], dtype=torch.int32)
    >>> types = (torch.bfloat16, torch.bfloat16)
    >>> scale = 192**-0.5
    >>> wrapper.plan(qo_indptr, kv_indptr, pages, lengths, 128, 512, 64, 64, False, scale, *types)
    >>> cache = torch.randn(10, 64, 576, dtype=torch.bfloat16, device="cuda")
    >>> q = torch.randn(2, 128, 576, dtype=torch.bfloat16, device="cuda")
    >>> wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:]).shape
    torch.Size([2, 128, 512])
    """

    @flashinfer_constructor
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        check_backend(backend, ("auto", "fa2", "fa3"))
        check_tensor("float_workspace_buffer", float_workspace_buffer)
        if not float_workspace_buffer.is_contiguous():
            raise ValueError("`float_workspace_buffer` must be contiguous")
        self._backend = backend
        self._use_cuda_graph = check_flag("use_cuda_graph", use_cuda_graph)
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._float_bytes = float_workspace_buffer.numel() * float_workspace_buffer.element_size()
        self._int_workspace_buffer = torch.empty(
            INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
        )
        # Engines hand it to _cached_module.plan(), which stages plans in memory of its own.
        self._pin_memory_int_workspace_buffer = torch.empty(0, dtype=torch.uint8)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        if use_cuda_graph:
            lengths = check_buffer("kv_len_arr", kv_len_arr, torch.int32, self.device)
            for name, buffer in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
                check_buffer(name, buffer, torch.int32, self.device, lengths.numel() + 1)
            check_buffer("kv_indices", kv_indices, torch.int32, self.device)
        self._planner: MlaPlanner | None = None
        self._options: MlaOptions | None = None
        self._modes = CallModes()
        self._batch: MlaBatch | None = None
        self._kv_indices: torch.Tensor | None = None
        self._run: Any = None

    # Made anew each time: kept, it would hold the wrapper and its plan until a collection.
    _cached_module = property(lambda self: PlannedModule(self._plan_again))
    _planned_results = property(lambda self: self._options and self._options.results)

    # --- Planning -----------------------------------------------------------------------------

    @flashinfer_api
    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        r"""Divide the work of a batch over the GPU.

        Index tensors on the host cost no wait for the GPU; those on it are fetched by one copy.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``[batch_size + 1]``, int32 or int64: request b has the query tokens
            ``qo_indptr[b] ... qo_indptr[b + 1] - 1``.
        kv_indptr : torch.Tensor
            ``[batch_size + 1]``, likewise: it has the pages ``kv_indices[kv_indptr[b] :
            kv_indptr[b + 1]]``.
        kv_indices : torch.Tensor
            Page numbers; used where they lie if they are int32 on the device.
        kv_len_arr : torch.Tensor
            ``[batch_size]``: KV tokens of each request.
        num_heads : int
            Query heads.
        head_dim_ckv, head_dim_kpe : int
            512 or 256, and 64 or 0.
        page_size : int
            Tokens of a page, any number from 1. The copy engine serves multiples of 16.
        causal : bool
            Whether a query token sees the KV tokens up to its own only, the last query token being
            the last KV token.
        sm_scale : float
            Positive factor of the logits.
        q_data_type, kv_data_type : torch.dtype
            float16 or bfloat16, both the same; on Hopper float8_e4m3fn for caches or for both.
        use_profiler : bool
            Whether the kernel, one of its own, records the events `flashinfer.mla.PROFILE_EVENTS`.
        metadata : MLAPlanMetadata, optional
            Stands in for the index tensors.
        cum_seq_lens_q, block_tables, seq_lens : torch.Tensor, optional
            In place of the first four: query tokens as `qo_indptr`, page numbers ``[batch_size,
            most_pages]``, and KV tokens. Beside the first four they are not looked at.
        max_q_len : int, optional
            The most query tokens of a request, if the caller wants that checked.
        query_layout, kv_cache_layout : str, optional
            ``"split"``: ``run`` is given two tensors of queries, of caches; ``"packed"``: one of
            each; None: either.
        lse_mode : str
            The base of log-sum-exps: ``"none"``: as ``run`` is told; ``"base2"``, ``"basee"``.
        output_dtype : torch.dtype, optional
            float16 or bfloat16; by default `q_data_type`, or bfloat16 if that has 8 bits.
        output_scale : str
            ``"none"``.
        scale_mode : str
            Which scales ``run`` takes: ``"default"`` and ``"kv-per-tensor"``: `ckv_scale` and
            `kpe_scale`; ``"bmm-scalar"``: `bmm1_scale` and `bmm2_scale`.
        skip_softmax : bool
            False.
        enable_pdl : bool, optional
            Programmatic dependent launch; None: where the device has it.
        use_sinks : bool
            Whether every ``run`` must be given `sinks`.

        Raises
        ------
        TypeError, ValueError
            If an argument is missing or not as described, lengths contradict the page table, a
            CUDA graph's buffer is too small, or a workspace is (the message says the bytes needed).
        """
        self._run = self._options = self._batch = None  # whatever becomes of this plan
        options = read_options(
            num_heads=num_heads,
            head_dim_ckv=head_dim_ckv,
            head_dim_kpe=head_dim_kpe,
            page_size=page_size,
            causal=causal,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            output_dtype=output_dtype,
            lse_mode=lse_mode,
            use_profiler=use_profiler,
        )
        refuse_modes(output_scale, skip_softmax)
        self._modes = read_call_modes(query_layout, kv_cache_layout, scale_mode, use_sinks)
        self._enable_pdl = check_optional_flag("enable_pdl", enable_pdl)
        given: dict[str, Any] = dict(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=kv_len_arr,
            cum_seq_lens_q=cum_seq_lens_q,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_q_len=max_q_len,
        )
        self._plan_batch(options, read_batch(metadata, given, options.page_size))

    def _plan_batch(self, options: MlaOptions, batch: MlaBatch) -> None:
        if self._use_cuda_graph:
            self._check_capacity(batch)
        elif batch.kv_indices.numel() < int(batch.kv_indptr[-1]):
            raise ValueError(
                f"`kv_indices` must have the {int(batch.kv_indptr[-1])} elements of `kv_indptr`, "
                f"got {batch.kv_indices.numel()}"
            )
        self._config = options.config(self._backend, self.device, batch.max_q_len)
        self._make_plan(options, (batch.qo_indptr, batch.kv_indptr, batch.kv_len_arr))
        if self._use_cuda_graph:
            self._kv_indices = self._copy_to_buffers(batch)
        else:
            self._kv_indices = place_indices(batch, self.device)
        self._options, self._batch = options, batch
        self._run = self._run_of(self._config.dtype_kpe)

    def _make_plan(self, options: MlaOptions, lists: tuple[torch.Tensor, ...]) -> None:
        """Plan for `qo_indptr`, `kv_indptr` and `kv_len_arr`, on the current stream's SMs."""
        qo_indptr, kv_indptr, kv_len_arr = lists
        planner = self._planner = self._planner or planner_if_any()
        if planner is None:
            return
        on_gpu = self.device.type == "cuda"
        planner.make(
            self._int_workspace_buffer if on_gpu else None,
            self._float_bytes,
            qo_indptr,
            kv_indptr,
            kv_len_arr,
            num_heads=options.num_heads,
            head_dim_ckv=options.head_dim_ckv,
            page_size=options.page_size,
            causal=options.causal,
            is_graph=self._use_cuda_graph,
            num_sms=get_stream_sm_count(self.device) if on_gpu else 0,
        )

    def _plan_again(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        heads: tuple[int, int, bool],
    ) -> None:
        """Plan other lengths for the options of the latest ``plan``.

        `heads` repeats its `num_heads`, `head_dim_ckv` and `causal`.
        """
        options = self._options
        if options is None or self._kv_indices is None:
            raise ValueError("plan() of the wrapper must be called before that of its module")
        expected = (options.num_heads, options.head_dim_ckv, options.causal)
        if heads != expected:
            raise ValueError(
                f"`num_heads`, `head_dim_ckv` and `causal` must be the {expected} of plan(), got "
                f"{heads}"
            )
        self._make_plan(options, (qo_indptr, kv_indptr, kv_len_arr))
        self._batch = MlaBatch(qo_indptr, kv_indptr, self._kv_indices, kv_len_arr)

    def _check_capacity(self, batch: MlaBatch) -> None:
        assert self._kv_len_arr_buf is not None and self._kv_indices_buf is not None
        if len(batch.kv_len_arr) > self._kv_len_arr_buf.numel():
            raise ValueError(
                f"the batch has {len(batch.kv_len_arr)} requests, the CUDA graph was made for "
                f"{self._kv_len_arr_buf.numel()}"
            )
        check_page_numbers("kv_indices", batch.kv_indices, self._kv_indices_buf, batch.kv_indptr)

    def _copy_to_buffers(self, batch: MlaBatch) -> torch.Tensor:
        for name in ("qo_indptr", "kv_indptr", "kv_len_arr"):
            copy_to_buffer(name, getattr(batch, name), getattr(self, f"_{name}_buf"))
        assert self._kv_indices_buf is not None
        return copy_to_buffer("kv_indices", batch.kv_indices, self._kv_indices_buf)

    # --- Running ------------------------------------------------------------------------------

    @overload
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: Literal[False] = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        **options: "Unpack[MLARunOptions]",
    ) -> torch.Tensor: ...
    @overload
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        *,
        return_lse: Literal[True],
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        **options: "Unpack[MLARunOptions]",
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @flashinfer_api(trace=mla_run_trace)
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | torch.Tensor | None = None,
        bmm2_scale: float | torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        r"""Attention of the planned batch for one layer.

        Parameters
        ----------
        q_nope : torch.Tensor
            ``[tokens, num_heads, head_dim_ckv]``; last dimension contiguous, rows at multiples of
            16 bytes, other strides free (a transposed product is fine). It may have more tokens
            than the plan; those are not computed.
        q_pe : torch.Tensor
            ``[tokens, num_heads, head_dim_kpe]``, likewise; None where `head_dim_kpe` is 0.
        ckv_cache, kpe_cache : torch.Tensor
            ``[num_pages, page_size, head_dim_ckv]`` and ``[.., head_dim_kpe]``, or with their head
            ``[num_pages, page_size, 1, ..]``, with the same freedom; the two may be column slices
            of one tensor. Beside a `ckv_cache` of 8 bits, `kpe_cache` may have 16.
        out : torch.Tensor, optional
            Where the output goes: shape of `q_nope`, `output_dtype`.
        lse : torch.Tensor, optional
            Where log-sum-exps go: ``[tokens, num_heads]`` float32, contiguous.
        return_lse : bool
            Whether they are returned.
        profiler_buffer : torch.Tensor, optional
            With `use_profiler`: uint64 or int64 words, zero before the call; docs/profiler.md.
        kv_len, page_table, o_scale, skip_softmax_threshold_scale_factor
            None: they belong to other backends.
        return_lse_base_on_e : bool
            Natural instead of base-2 logarithms.
        query, kv_cache : torch.Tensor or tuple of torch.Tensor, optional
            In place of `q_nope` and `q_pe`, and of the caches: pairs, or one tensor whose last
            dimension is ``head_dim_ckv + head_dim_kpe``.
        ckv_scale, kpe_scale : float, optional
            Factors of the caches, None: 1; the same for both unless `ckv_cache` has 8 bits.
        sinks : torch.Tensor, optional
            ``[num_heads]`` float32: a logit per head that takes part in the softmax without a
            value.
        bmm1_scale : float, optional
            Factor of the logits in place of `sm_scale`.
        bmm2_scale : float, optional
            Factor of the output. None: 1.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            Output ``[tokens, num_heads, head_dim_ckv]`` and, with `return_lse`, log-sum-exps.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        if self._run is None:
            raise ValueError("plan() must be called before run()")
        assert self._options is not None and self._planner is not None  # `plan` sets them
        call = self._read_call(
            q_nope=q_nope,
            q_pe=q_pe,
            ckv_cache=ckv_cache,
            kpe_cache=kpe_cache,
            profiler_buffer=profiler_buffer,
            kv_len=kv_len,
            page_table=page_table,
            return_lse_base_on_e=return_lse_base_on_e,
            o_scale=o_scale,
            query=query,
            kv_cache=kv_cache,
            ckv_scale=ckv_scale,
            kpe_scale=kpe_scale,
            sinks=sinks,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
        )
        q = call.q_nope
        if out is None:
            out = torch.empty(q.shape, dtype=self._options.o_dtype, device=q.device)
        if check_flag("return_lse", return_lse) and lse is None:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        run = self._run
        if call.kpe_cache is not None and call.kpe_cache.dtype != self._options.kv_dtype:
            run = self._run_of(call.kpe_cache.dtype)
        run(
            self._planner.plan,
            (self._int_workspace_buffer, self._float_workspace_buffer),
            (q, call.q_pe),
            (call.ckv_cache, call.kpe_cache, self._kv_indices),
            out,
            lse,
            sinks,
            (call.sm_scale, call.o_scale, _LN_2 if call.lse_on_e else 1.0, call.rope_factor),
            profiler_buffer,
            self._enable_pdl,
        )
        return (out, lse) if return_lse and lse is not None else out

    def _run_of(self, dtype_kpe: torch.dtype) -> Any:
        """The kernel of the plan for rotary rows of a dtype."""
        config = dataclasses.replace(self._config, dtype_kpe=dtype_kpe)
        return get_mla_module_of(config).mla_run if self.device.type == "cuda" else without_gpu

    def _read_call(self, **arguments: Any) -> MlaCall:
        """Arguments of ``run`` in one form, which the trace reads too."""
        assert self._options is not None  # `plan` sets them
        return read_call(self._options, self._modes, **arguments)

    def end_forward(self) -> None:
        """Deprecated: nothing ends with a step; here for callers that pair it."""
