"""``BatchMLAPagedAttentionWrapper``: absorbed latent attention over a paged cache."""

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from .._attention.checks import check_backend, refuse, scalar
from .._attention.index_tensors import check_buffer, check_page_numbers, copy_to_buffer
from .._common.checks import flag as check_flag
from .._instrument.decorator import flashinfer_api, flashinfer_constructor
from ..jit.attention.mla import MlaPlanner, get_mla_module_of
from ..trace.templates.mla import mla_run_trace
from .metadata import MLAPlanMetadata
from .problem import MlaBatch, MlaOptions, place_indices, read_batch, read_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._attention.wrappers.run_options import MLARunOptions

INT_WORKSPACE_BYTES = 8 << 20
"""Work lists of some 260,000 tiles of 64 query rows."""


_LN_2 = math.log(2.0)


class _Call(NamedTuple):
    """Arguments of one launch."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor | None
    ckv_cache: torch.Tensor
    kpe_cache: torch.Tensor | None
    sm_scale: float
    o_scale: float
    lse_on_e: bool


class BatchMLAPagedAttentionWrapper:
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
        ``"auto"`` or ``"fa3"``, the kernel for Hopper.

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
        check_backend(backend, ("auto", "fa3"))
        if not isinstance(float_workspace_buffer, torch.Tensor):
            raise TypeError(
                "`float_workspace_buffer` must be a torch.Tensor, got "
                f"{type(float_workspace_buffer).__name__}"
            )
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
        self._batch: MlaBatch | None = None
        self._kv_indices: torch.Tensor | None = None
        self._run: Any = None
        self._cached_module = _PlannedModule(self)

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
            float16 or bfloat16, both the same.
        use_profiler : bool
            False.
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
            float16 or bfloat16; by default `q_data_type`.
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
            *(num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale),
            *(q_data_type, kv_data_type, output_dtype, lse_mode),
        )
        _check_modes(use_profiler, output_scale, scale_mode, skip_softmax)
        for name, layout in (("query_layout", query_layout), ("kv_cache_layout", kv_cache_layout)):
            if layout not in (None, "packed", "split"):
                raise ValueError(f"`{name}` must be 'packed', 'split' or None, got {layout!r}")
        if enable_pdl is not None:
            check_flag("enable_pdl", enable_pdl)
        self._layouts = (query_layout, kv_cache_layout)
        self._scale_mode, self._enable_pdl = scale_mode, enable_pdl
        self._use_sinks = check_flag("use_sinks", use_sinks)
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
        if self._planner is None:
            self._planner = MlaPlanner()
        if self._use_cuda_graph:
            self._check_capacity(batch)
        elif batch.kv_indices.numel() < int(batch.kv_indptr[-1]):
            raise ValueError(
                f"`kv_indices` must have the {int(batch.kv_indptr[-1])} elements of `kv_indptr`, "
                f"got {batch.kv_indices.numel()}"
            )
        on_gpu = self.device.type == "cuda"
        config = options.config("fa3")
        self._planner.make(
            int_workspace=self._int_workspace_buffer if on_gpu else None,
            float_workspace_bytes=self._float_bytes,
            qo_indptr=batch.qo_indptr,
            kv_indptr=batch.kv_indptr,
            kv_len_arr=batch.kv_len_arr,
            num_heads=options.num_heads,
            head_dim_ckv=options.head_dim_ckv,
            page_size=options.page_size,
            causal=options.causal,
            is_graph=self._use_cuda_graph,
        )
        if self._use_cuda_graph:
            self._kv_indices = self._keep(batch)
        else:
            self._kv_indices = place_indices(batch, self.device)
        self._options, self._batch = options, batch
        self._run = get_mla_module_of(config).mla_run if on_gpu else _without_gpu

    def _check_capacity(self, batch: MlaBatch) -> None:
        assert self._kv_len_arr_buf is not None and self._kv_indices_buf is not None
        if len(batch.kv_len_arr) > self._kv_len_arr_buf.numel():
            raise ValueError(
                f"the batch has {len(batch.kv_len_arr)} requests, the CUDA graph was made for "
                f"{self._kv_len_arr_buf.numel()}"
            )
        check_page_numbers("kv_indices", batch.kv_indices, self._kv_indices_buf, batch.kv_indptr)

    def _keep(self, batch: MlaBatch) -> torch.Tensor:
        buffers = (self._qo_indptr_buf, self._kv_indptr_buf, self._kv_len_arr_buf)
        values = (batch.qo_indptr, batch.kv_indptr, batch.kv_len_arr)
        for name, value, buffer in zip(
            ("qo_indptr", "kv_indptr", "kv_len_arr"), values, buffers, strict=True
        ):
            assert buffer is not None
            copy_to_buffer(name, value, buffer)
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
            ``[num_pages, page_size, head_dim_ckv]`` and ``[num_pages, page_size, head_dim_kpe]``,
            with the same freedom; the two may be column slices of one tensor.
        out : torch.Tensor, optional
            Where the output goes: shape of `q_nope`, `output_dtype`.
        lse : torch.Tensor, optional
            Where log-sum-exps go: ``[tokens, num_heads]`` float32, contiguous.
        return_lse : bool
            Whether they are returned.
        profiler_buffer, kv_len, page_table, o_scale, skip_softmax_threshold_scale_factor
            None: they belong to other backends.
        return_lse_base_on_e : bool
            Natural instead of base-2 logarithms.
        query, kv_cache : torch.Tensor or tuple of torch.Tensor, optional
            In place of `q_nope` and `q_pe`, and of the caches: pairs, or one tensor whose last
            dimension is ``head_dim_ckv + head_dim_kpe``.
        ckv_scale, kpe_scale : float, optional
            What `ckv_cache` and `kpe_cache` are to be multiplied by; the kernel needs both to be
            the same. None: 1.
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
        call = self._resolve(
            *(q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, profiler_buffer, kv_len),
            *(page_table, return_lse_base_on_e, o_scale),
            query=query,
            kv_cache=kv_cache,
            ckv_scale=ckv_scale,
            kpe_scale=kpe_scale,
            sinks=sinks,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
        )
        assert self._options is not None and self._planner is not None  # `_resolve` asked for both
        q = call.q_nope
        if out is None:
            out = torch.empty(q.shape, dtype=self._options.o_dtype, device=q.device)
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        self._run(
            self._planner.plan,
            (self._int_workspace_buffer, self._float_workspace_buffer),
            (q, call.q_pe),
            (call.ckv_cache, call.kpe_cache, self._kv_indices),
            *(out, lse, sinks),
            (call.sm_scale, call.o_scale, _LN_2 if call.lse_on_e else 1.0),
            self._enable_pdl,
        )
        if not return_lse:
            return out
        assert lse is not None
        return out, lse

    def _resolve(
        self,
        q_nope: Any = None,
        q_pe: Any = None,
        ckv_cache: Any = None,
        kpe_cache: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        profiler_buffer: Any = None,
        kv_len: Any = None,
        page_table: Any = None,
        return_lse_base_on_e: bool = False,
        o_scale: Any = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: Any = None,
        kpe_scale: Any = None,
        sinks: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> _Call:
        """Arguments of ``run`` in one form."""
        options = self._options
        assert options is not None
        if query is not None or self._layouts[0] is not None:
            q_nope, q_pe = self._split("query", query, q_nope, q_pe, self._layouts[0])
        if kv_cache is not None or self._layouts[1] is not None:
            caches = (ckv_cache, kpe_cache)
            ckv_cache, kpe_cache = self._split("kv_cache", kv_cache, *caches, self._layouts[1])
        refuse(
            "it belongs to another backend",
            profiler_buffer=profiler_buffer,
            kv_len=kv_len,
            page_table=page_table,
            o_scale=o_scale,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )
        sm_scale, factor = options.sm_scale, 1.0
        if not (ckv_scale is None and kpe_scale is None and bmm1_scale is bmm2_scale is None):
            sm_scale, factor = self._scales(ckv_scale, kpe_scale, bmm1_scale, bmm2_scale)
        if self._use_sinks and sinks is None:
            raise ValueError("`sinks` must be given: plan() was told `use_sinks`")
        if not isinstance(q_nope, torch.Tensor):
            raise TypeError(f"`q_nope` must be a torch.Tensor, got {type(q_nope).__name__}")
        if q_nope.ndim != 3:
            raise ValueError(f"`q_nope` must have 3 dimensions, got shape {list(q_nope.shape)}")
        on_e = options.lse_mode == "basee"
        if return_lse_base_on_e:
            on_e = check_flag("return_lse_base_on_e", return_lse_base_on_e)
            if options.lse_mode == "base2":
                raise ValueError("`return_lse_base_on_e` must be False: `lse_mode` is 'base2'")
        if options.head_dim_kpe == 0:
            refuse("`head_dim_kpe` is 0", q_pe=_columns(q_pe), kpe_cache=_columns(kpe_cache))
            q_pe = kpe_cache = None
        parts = {"ckv_cache": ckv_cache}
        if options.head_dim_kpe:
            parts |= {"q_pe": q_pe, "kpe_cache": kpe_cache}
        for name, part in parts.items():
            if part is None:
                raise TypeError(f"`{name}` must be a torch.Tensor, got None")
        return _Call(q_nope, q_pe, ckv_cache, kpe_cache, sm_scale, factor, on_e)

    def _split(self, name: str, both: Any, first: Any, second: Any, layout: str | None) -> Any:
        """The two parts, however they are given."""
        if both is None:
            if layout == "packed":
                raise ValueError(f"`{name}` must be given as one tensor, as plan() was told")
            return first, second
        if first is not None or second is not None:
            raise ValueError(f"`{name}` must be left out where its parts are given")
        if isinstance(both, torch.Tensor):
            if layout == "split":
                raise ValueError(f"`{name}` must be a pair of tensors, as plan() was told")
            assert self._options is not None
            dims = (self._options.head_dim_ckv, self._options.head_dim_kpe)
            if both.ndim != 3 or both.shape[-1] != sum(dims):
                raise ValueError(
                    f"`{name}` must have 3 dimensions, the last of {sum(dims)}, got shape "
                    f"{list(both.shape)}"
                )
            return both[..., : dims[0]], both[..., dims[0] :] if dims[1] else None
        if not isinstance(both, (tuple, list)) or len(both) != 2:
            raise TypeError(
                f"`{name}` must be a torch.Tensor or a pair of them, got {type(both).__name__}"
            )
        if layout == "packed":
            raise ValueError(f"`{name}` must be one tensor, as plan() was told")
        return both

    def _scales(self, ckv: Any, kpe: Any, bmm1: Any, bmm2: Any) -> tuple[float, float]:
        """Factors of the logits and of the output."""
        assert self._options is not None
        if self._scale_mode == "bmm-scalar":
            refuse("plan() was told scale_mode 'bmm-scalar'", ckv_scale=ckv, kpe_scale=kpe)
            sm_scale = self._options.sm_scale if bmm1 is None else _positive("bmm1_scale", bmm1)
            return sm_scale, 1.0 if bmm2 is None else scalar("bmm2_scale", bmm2)
        refuse(
            f"plan() was told scale_mode {self._scale_mode!r}, not 'bmm-scalar'",
            bmm1_scale=bmm1,
            bmm2_scale=bmm2,
        )
        scale = 1.0 if ckv is None else _positive("ckv_scale", ckv)
        other = 1.0 if kpe is None else _positive("kpe_scale", kpe)
        if self._options.head_dim_kpe and other != scale:
            raise ValueError(f"`kpe_scale` must be the `ckv_scale` {scale}, got {other}")
        return self._options.sm_scale * scale, scale

    def end_forward(self) -> None:
        """Deprecated: nothing ends with a step; here for callers that pair it."""


class _PlannedModule:
    """Plans anew for a captured graph; engines call it ``_cached_module``."""

    def __init__(self, wrapper: BatchMLAPagedAttentionWrapper) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pin_memory_int_workspace_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        causal: bool,
    ) -> None:
        """Plan the wrapper's next launches with the options of its latest ``plan``.

        Page numbers stay where they are: the caller has written them to the wrapper's buffer.

        Raises
        ------
        ValueError
            If the wrapper has no plan yet, or it is for other heads or another mask.
        """
        wrapper = self._wrapper
        options = wrapper._options
        if options is None or wrapper._kv_indices is None or wrapper._planner is None:
            raise ValueError("plan() of the wrapper must be called before that of its module")
        planned = (options.num_heads, options.head_dim_ckv, options.causal)
        if (num_heads, head_dim_ckv, causal) != planned:
            raise ValueError(
                f"`num_heads`, `head_dim_ckv` and `causal` must be the {planned} of plan(), got "
                f"{(num_heads, head_dim_ckv, causal)}"
            )
        wrapper._planner.make(
            int_workspace=wrapper._int_workspace_buffer,
            float_workspace_bytes=wrapper._float_bytes,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_len_arr=kv_len_arr,
            num_heads=num_heads,
            head_dim_ckv=head_dim_ckv,
            page_size=options.page_size,
            causal=causal,
            is_graph=wrapper._use_cuda_graph,
        )
        wrapper._batch = MlaBatch(qo_indptr, kv_indptr, wrapper._kv_indices, kv_len_arr)


def _positive(name: str, value: Any) -> float:
    number = scalar(name, value)
    if number <= 0.0:
        raise ValueError(f"`{name}` must be positive, got {number}")
    return number


def _columns(tensor: Any) -> Any:
    """The tensor, or None if it has no columns."""
    return None if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (0,) else tensor


def _check_modes(use_profiler: Any, output_scale: Any, scale_mode: Any, skip_softmax: Any) -> None:
    if check_flag("use_profiler", use_profiler):
        raise ValueError("`use_profiler` must be False: the kernels write no profile")
    if output_scale != "none":
        raise ValueError(f"`output_scale` must be 'none', got {output_scale!r}")
    if scale_mode not in ("default", "kv-per-tensor", "bmm-scalar"):
        raise ValueError(
            f"`scale_mode` must be 'default', 'kv-per-tensor' or 'bmm-scalar', got {scale_mode!r}"
        )
    if check_flag("skip_softmax", skip_softmax):
        raise ValueError("`skip_softmax` must be False: every weight is computed")


def _without_gpu(*_: Any) -> None:
    raise ValueError(
        "`float_workspace_buffer` must be a CUDA tensor, got one on the CPU; without a GPU: "
        "FLASHINFER_BACKEND=reference"
    )
