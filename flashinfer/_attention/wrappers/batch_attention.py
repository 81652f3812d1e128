"""Attention of mixed batches: ``flashinfer.attention.BatchAttention``."""

import torch

from ..._common.cache_layout import split_cache
from ..._common.checks import count as check_count
from ..._instrument.decorator import flashinfer_api, flashinfer_constructor
from ...trace.templates.attention_wrappers import batch_attention_run_trace
from ..checks import check_profile, soft_cap
from ..index_tensors import device_indices, host_indices
from ..plan.mixed import FIRST_WORKSPACE_BYTES, MixedExecutor
from ..plan.requests import ArgumentNames, AttentionProblem, PlanTensors, Requests
from .base import AttentionWrapper, Cache, SpecArguments
from .paged import PagedWrapper

PROFILE_EVENTS = ("query", "load", "keys", "weights", "values", "output")
"""Names of the events in a profile, by number; include/flashinfer/attention/events.cuh."""


class BatchAttention(PagedWrapper, AttentionWrapper):
    r"""Attention of a batch in which some requests decode and others prefill, in one call.

    With ``"fa2"`` requests of up to 16 packed query rows (query tokens times query heads per KV
    head) are computed by the tile that decoding has, the others by one for prefill; both share the
    GPU from the beginning to the end of the launch. With ``"fa3"`` all have the tile of prefill.
    ``"auto"`` takes what is faster, which may be a launch of ``"fa2"`` for the former and one of
    ``"fa3"`` for the others. The wrapper has workspaces of its own, which grow with the plans.

    Parameters
    ----------
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    device : str
        The GPU.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; see docs/attention.md.

    Raises
    ------
    TypeError, ValueError
        If `kv_layout` or `backend` is another one, or `device` names none.

    Examples
    --------
    >>> wrapper = flashinfer.BatchAttention(device="cuda")
    >>> qo_indptr = torch.tensor([0, 40, 41], dtype=torch.int32)
    >>> kv_indptr = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> pages = torch.tensor([9, 1, 4, 0, 7], dtype=torch.int32, device="cuda")
    >>> lengths = torch.tensor([48, 19], dtype=torch.int32)
    >>> wrapper.plan(qo_indptr, kv_indptr, pages, lengths, 32, 8, 128, 128, 16, causal=True)
    >>> cache = torch.randn(10, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> q = torch.randn(41, 32, 128, dtype=torch.bfloat16, device="cuda")
    >>> out, lse = wrapper.run(q, cache)
    """

    _executor_type = MixedExecutor
    _executor: MixedExecutor

    @flashinfer_constructor
    def __init__(self, kv_layout: str = "NHD", device: str = "cuda", backend: str = "auto") -> None:
        workspace = torch.empty(FIRST_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        super().__init__(workspace, kv_layout, False, backend, None)

    @flashinfer_api
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
        o_data_type: torch.dtype | None = None,
    ) -> None:
        """Divide the work of a batch over the GPU; any number of runs may follow.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            First query token of each request, ``[batch_size + 1]``, int32 or int64. On the host
            nothing waits for the GPU; index tensors on the GPU are fetched by one copy.
        kv_indptr : torch.Tensor
            ``[batch_size + 1]``, int32 or int64: request b has the pages
            ``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``.
        kv_indices : torch.Tensor
            Page numbers, int32 or int64; used where it lies if it is int32 on the device.
        kv_len_arr : torch.Tensor
            Tokens of keys of each request, ``[batch_size]``, int32 or int64, not more than fit its
            pages.
        num_qo_heads, num_kv_heads : int
            The first a multiple of the second, up to 64 times.
        head_dim_qk, head_dim_vo : int
            Multiples of 16 from 16 to 512; beyond 256, of values one of 32.
        page_size : int
            Tokens of a page, any number from 1.
        causal : bool
            Query i of n sees keys up to ``i + kv_len - n``.
        sm_scale : float, optional
            Factor of the logits; ``1 / sqrt(head_dim_qk)`` by default.
        logits_soft_cap : float, optional
            c: logits become ``c * tanh(logits / c)``. None or 0: they do not.
        q_data_type : torch.dtype
            float16, bfloat16, float8_e4m3fn or float8_e5m2.
        kv_data_type : torch.dtype
            `q_data_type`, float8_e4m3fn, float8_e5m2, or uint8: pairs of 4 bits (NVFP4).
        use_profiler : bool
            Whether the kernel, one of its own, records the events `PROFILE_EVENTS`. All requests
            are in one launch then.
        o_data_type : torch.dtype, optional
            float16 or bfloat16, by default `q_data_type`; needed with 8-bit queries.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as listed above, naming it.
        """
        self._problem = None  # whatever becomes of this plan
        page_size = check_count("page_size", page_size)
        spec = self._spec(
            SpecArguments(
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                head_dim_vo,
                logits_soft_cap=logits_soft_cap,
                sm_scale=sm_scale,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                o_data_type=o_data_type,
                causal=causal,
                use_profiler=use_profiler,
            )
        )
        names = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len_arr": kv_len_arr}
        host_qo_indptr, host_kv_indptr, kv_len = host_indices(names)
        requests = Requests(
            ArgumentNames.BATCH_ATTENTION,
            host_qo_indptr,
            host_kv_indptr,
            kv_len,
            page_size=page_size,
            causal=spec.causal,
        )
        pages = device_indices("kv_indices", kv_indices, self.device)
        problem = AttentionProblem(spec, requests, PlanTensors(pages))
        self._executor.plan_mixed(problem)
        self._problem = self._plan_problem = problem

    @flashinfer_api(trace=batch_attention_run_trace)
    def run(
        self,
        q: torch.Tensor,
        kv_cache: Cache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: Cache | None = None,
        q_scale: float | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch for one layer.

        Parameters
        ----------
        q : torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``, dtype as planned; last dimension
            contiguous, rows at multiples of 16 bytes.
        kv_cache : torch.Tensor or tuple of torch.Tensor
            Keys and values, each ``[num_pages, page_size, num_kv_heads, head_dim]`` (``"NHD"``) or
            ``[num_pages, num_kv_heads, page_size, head_dim]`` (``"HND"``), or one tensor with a
            dimension of 2 after the first; pages of one token need no dimension for it; dtype as
            planned. Last dimension contiguous, rows at multiples of 16 bytes, other strides free.
        out : torch.Tensor, optional
            The result, ``[qo_indptr[-1], num_qo_heads, head_dim_vo]``, dtype as planned, strides as
            for `q`; overlaps no input.
        lse : torch.Tensor, optional
            Log-sum-exps of the logits, base 2, ``[qo_indptr[-1], num_qo_heads]``, float32,
            contiguous; -inf where no key is seen.
        k_scale, v_scale : float or torch.Tensor, optional
            Scales of a quantised cache: the first multiplies the logits, the second the output.
            As for ``BatchPrefillWithPagedKVCacheWrapper.run``.
        logits_soft_cap : float
            0, or what was planned.
        profiler_buffer : torch.Tensor, optional
            With `use_profiler`: uint64 or int64 words, zero before the call; docs/profiler.md.
        kv_cache_sf : torch.Tensor or tuple of torch.Tensor, optional
            Scales of a 4-bit cache, as for ``BatchPrefillWithPagedKVCacheWrapper.run``.
        q_scale : float or torch.Tensor, optional
            Scale of quantised queries, which multiplies the logits. As there.

        Returns
        -------
        out, lse : torch.Tensor

        Raises
        ------
        TypeError, ValueError
            If nothing is planned, or an argument is not as described.
        """
        if self._problem is not None:
            check_profile(self._problem.spec.profiled, profiler_buffer)
            self._executor.profiler_buffer = profiler_buffer
        if logits_soft_cap and self._problem is not None:
            planned = self._problem.spec.logits_soft_cap
            if soft_cap(logits_soft_cap) != planned:
                raise ValueError(
                    f"`logits_soft_cap` must be 0 or the {planned} of plan(), got {logits_soft_cap}"
                )
        k, v = split_cache(kv_cache, "kv_cache")
        result = self._launch(
            q,
            k,
            v,
            out=out,
            lse=lse,
            return_lse=True,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_cache_sf=kv_cache_sf,
        )
        return result[0], result[1]
