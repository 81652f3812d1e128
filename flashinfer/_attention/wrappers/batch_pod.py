"""Two batches in one launch: ``flashinfer.pod.BatchPODWithPagedKVCacheWrapper``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..._common.cache_layout import split_cache
from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._instrument.decorator import flashinfer_api, flashinfer_constructor
from ...trace.templates.pod import batch_pod_run_trace
from ..checks import refuse, with_data_type
from ..index_tensors import device_indices, host_indices
from ..plan.requests import ArgumentNames, AttentionProblem, PlanTensors, Requests
from .base import Cache, Result, SpecArguments, results_of
from .two_parts import Parts, TwoPartWrapper, mask_of_part


class BatchPODWithPagedKVCacheWrapper(TwoPartWrapper):
    r"""A batch that prefills and a batch that decodes, in one launch.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        For partial results of requests that are split, contiguous, any dtype; 128 MiB are plenty.
    kv_layout : str
        Layout of both caches: ``"NHD"`` or ``"HND"``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace)
    >>> i32 = dict(dtype=torch.int32)
    >>> prefill = torch.tensor([0, 40], **i32), torch.tensor([0, 3], **i32)
    >>> decode = torch.tensor([0, 1, 2], **i32), torch.tensor([0, 1, 3], **i32)
    >>> pages = torch.arange(6, device="cuda", **i32)
    >>> last_p, last_d = torch.tensor([8], **i32), torch.tensor([5, 16], **i32)
    >>> wrapper.plan(*prefill, pages[:3], last_p, *decode, pages[3:], last_d, 32, 8, 128, 16)
    >>> cache = torch.randn(6, 2, 16, 8, 128, dtype=torch.float16, device="cuda")
    >>> q_p = torch.randn(40, 32, 128, dtype=torch.float16, device="cuda")
    >>> q_d = torch.randn(2, 32, 128, dtype=torch.float16, device="cuda")
    >>> out_p, out_d = wrapper.run(q_p, cache, q_d, cache, causal_p=True)
    """

    @flashinfer_constructor
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout, False)
        self._bases: Parts | None = None
        self._causal = False  # of the latest run: most plans are for another like it

    @flashinfer_api
    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        o_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Describe both batches; any number of runs may follow.

        Parameters
        ----------
        qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p : torch.Tensor
            Query tokens and page table of the batch that prefills, as for
            ``BatchPrefillWithPagedKVCacheWrapper.plan``.
        qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d : torch.Tensor
            The same of the batch that decodes. A query of it sees all keys of its request.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Sizes of both batches.
        pos_encoding_mode, window_left, sm_scale, rope_scale, rope_theta
            Options of both batches, as for ``BatchPrefillWithPagedKVCacheWrapper.plan``.
        q_data_type, kv_data_type : str or torch.dtype, optional
            float16, bfloat16, float8_e4m3fn or float8_e5m2; that, or one of the latter two.
        data_type : str or torch.dtype, optional
            Stands in for those of the two that are left out; one of 8 bits is the cache's alone.
        non_blocking : bool
            Whether to return before work list and index tensors are on the GPU; what lies in pinned
            memory must then stay as it is until they are.
        o_data_type : str or torch.dtype, optional
            float16 or bfloat16, by default that of the queries; needed with those of 8 bits.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, naming it.
        """
        self._bases = self._key = None  # whatever becomes of this plan
        q_data_type, kv_data_type = with_data_type(q_data_type, kv_data_type, data_type)
        page_size = check_count("page_size", page_size)
        check_count("head_dim", head_dim)
        non_blocking = check_flag("non_blocking", non_blocking)
        spec = self._spec(
            SpecArguments(
                num_qo_heads,
                num_kv_heads,
                head_dim,
                head_dim,
                pos_encoding_mode=pos_encoding_mode,
                window_left=window_left,
                sm_scale=sm_scale,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type="float16" if q_data_type is None else q_data_type,
                kv_data_type=kv_data_type,
                o_data_type=o_data_type,
            )
        )
        indices = host_indices(
            {
                "qo_indptr_p": qo_indptr_p,
                "kv_indptr_p": kv_indptr_p,
                "last_page_len_p": last_page_len_p,
                "qo_indptr_d": qo_indptr_d,
                "kv_indptr_d": kv_indptr_d,
                "last_page_len_d": last_page_len_d,
            }
        )
        tensors = PlanTensors(alibi_slopes=self._alibi_slopes(spec))
        prefill, decode = (
            AttentionProblem(
                spec,
                Requests(
                    names,
                    qo_indptr,
                    kv_indptr,
                    last_page_len=last,
                    page_size=page_size,
                    window_left=spec.window_left,
                ),
                tensors._replace(
                    kv_indices=device_indices(f"kv_indices_{part}", pages, self.device)
                ),
            )
            for part, names, pages, (qo_indptr, kv_indptr, last) in (
                ("p", ArgumentNames.POD_PREFILL, kv_indices_p, indices[:3]),
                ("d", ArgumentNames.POD_DECODE, kv_indices_d, indices[3:]),
            )
        )
        self._non_blocking = non_blocking
        parts = _with_causality(prefill, self._causal), decode
        self._plan_parts(parts, non_blocking)
        self._bases, self._key = (prefill, decode), self._causal

    begin_forward = plan

    @flashinfer_api(trace=batch_pod_run_trace)
    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: Cache,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        q_scale_p: float | torch.Tensor | None = None,
        k_scale_p: float | torch.Tensor | None = None,
        v_scale_p: float | torch.Tensor | None = None,
    ) -> tuple[Result, Result]:
        """Attention of both batches, for one layer.

        Parameters
        ----------
        q_p, q_d : torch.Tensor
            Queries, ``[tokens, num_qo_heads, head_dim]``, dtype as planned; last dimension
            contiguous, rows at multiples of 16 bytes.
        paged_kv_cache_p, paged_kv_cache_d : torch.Tensor or tuple of torch.Tensor
            Keys and values, as for ``BatchPrefillWithPagedKVCacheWrapper.run``; mostly one cache.
        custom_mask_p : torch.Tensor, optional
            Keys that the queries of the prefilling batch see: the requests' ``[qo_len, kv_len]``
            one after the other, bool. Takes the place of `causal_p`.
        packed_custom_mask_p : torch.Tensor, optional
            The same as little-endian bits, each request from a new byte on, uint8.
        causal_p : bool
            Query i of a prefill sees keys up to ``i + kv_len - qo_len``. A run that changes it
            plans the launch again.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            Scales of quantised tensors of the decoding part: the first two multiply its logits, the
            last its outputs. On the device, float32, one number or a value per head.
        return_lse : bool
            Whether log-sum-exps are returned, base 2.
        use_fp16_qk_reduction : bool
            False: logits are summed in float32.
        enable_pdl : bool, optional
            Programmatic dependent launch; None: where the GPU has it.
        q_scale_p, k_scale_p, v_scale_p : float or torch.Tensor, optional
            The same of the prefill.

        Returns
        -------
        tuple
            ``(out_p, out_d)``, shapes of the queries, or ``((out_p, lse_p), (out_d, lse_d))`` with
            log-sum-exps ``[tokens, num_qo_heads]`` float32.

        Raises
        ------
        TypeError, ValueError
            If nothing is planned, or an argument is not as described.
        """
        call = locals()
        refuse("logits are summed in float32", use_fp16_qk_reduction=use_fp16_qk_reduction)
        masks = (custom_mask_p, packed_custom_mask_p)
        caches = (
            split_cache(paged_kv_cache_p, "paged_kv_cache_p"),
            split_cache(paged_kv_cache_d, "paged_kv_cache_d"),
        )
        self._plan_for(causal_p, masks, lambda: self._problems_of(call))
        self._causal = causal_p
        return self._launch_parts(
            (q_p, *caches[0]),
            (q_d, *caches[1]),
            ((q_scale_p, k_scale_p, v_scale_p), (q_scale, k_scale, v_scale)),
            (check_flag("return_lse", return_lse),) * 2,
            enable_pdl,
        )

    def _plan_run(self, problems: Parts) -> None:
        self._plan_parts(problems, self._non_blocking)

    @property
    def _planned_results(self) -> tuple[int, torch.dtype] | None:
        return results_of(None if self._bases is None else self._bases[0])

    def _problems_of(self, call: Mapping[str, Any]) -> Parts:
        """Both parts of a run with these arguments."""
        if self._bases is None:
            raise ValueError("plan() must be called before run(), and again after new workspaces")
        prefill, decode = self._bases
        prefill = _with_causality(prefill, check_flag("causal_p", call["causal_p"]))
        mask, packed = call["custom_mask_p"], call["packed_custom_mask_p"]
        return mask_of_part(prefill, "p", mask, packed, self.device), decode


def _with_causality(problem: AttentionProblem, causal: bool) -> AttentionProblem:
    spec = dataclasses.replace(problem.spec, causal=causal)
    return AttentionProblem(spec, problem.requests._replace(causal=causal), problem.tensors)
