"""Prefill and decode in one launch ("prefill on decode"): each has tensors of its own.

Prefill is bound by arithmetic and decode by memory; computed side by side they use both.
A. K. Kamath et al., "POD-Attention: Unlocking Full Prefill-Decode Overlap for Faster LLM
Inference", 2025. Here a launch has one work list: its items are of two kinds, each with its tile
and its tensors, and the planner spreads both over all CTAs.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..._common.cache_layout import is_hnd, split_cache
from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._common.checks import named
from ..._common.checks import tensor as check_tensor
from ..._instrument.decorator import flashinfer_api, flashinfer_constructor
from ...trace.templates.pod import pod_run_trace
from ..checks import refuse, with_data_type
from ..index_tensors import (
    check_buffer,
    check_fits,
    check_page_numbers,
    copy_to_buffer,
    device_indices,
    host_page_table,
)
from ..plan.launch import GraphCapacity
from ..plan.requests import ArgumentNames, AttentionProblem, PlanTensors, Requests
from .base import Cache, Result, SpecArguments, results_of
from .two_parts import (
    Parts,
    RunOptions,
    TwoPartWrapper,
    check_planned_options,
    mask_of_part,
    with_run_options,
)


class PartOptions(NamedTuple):
    """Options of one part of a run."""

    kv_layout: str
    causal: bool
    others: RunOptions


def _reader(part: str) -> Callable[[Mapping[str, Any]], PartOptions]:
    """Reads the options of a part from the arguments of a run by their names."""
    names = ("kv_layout", "causal", *RunOptions._fields)
    get = operator.itemgetter(*(f"{name}_{part}" for name in names))

    def read(call: Mapping[str, Any]) -> PartOptions:
        kv_layout, causal, *others = get(call)
        return PartOptions(kv_layout, causal, RunOptions(*others))

    return read


_prefill_options, _decode_options = _reader("p"), _reader("d")


class PODWithPagedKVCacheWrapper(TwoPartWrapper):
    r"""One request that prefills and a batch that decodes, in one launch.

    `plan` is given the batch; `run` the tensors of both. The first run with other lengths of the
    prefill plans the launch again.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        For partial results of requests that are split, contiguous, any dtype; 128 MiB are plenty.
    kv_layout : str
        Layout of the batch's cache: ``"NHD"`` or ``"HND"``.
    use_cuda_graph : bool
        Whether ``run`` will be captured: the graph then serves every batch of up to
        ``len(paged_kv_last_page_len_buffer)`` requests by planning anew, with the prefill's
        lengths of the run that was captured; the wrapper then runs with no others.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : torch.Tensor
        With `use_cuda_graph`: int32 buffers on the device, of ``capacity + 1`` elements, of the
        most page numbers a batch can have, and of ``capacity``. ``plan`` fills them.
    jit_args : None
        There are no variants of two tiles.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace)
    >>> indptr = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> pages = torch.tensor([9, 1, 4, 0, 7], dtype=torch.int32, device="cuda")
    >>> last = torch.tensor([16, 3], dtype=torch.int32)
    >>> wrapper.plan(indptr, pages, last, 32, 8, 128, 16)
    >>> cache = torch.randn(10, 2, 16, 8, 128, dtype=torch.float16, device="cuda")
    >>> q_d = torch.randn(2, 32, 128, dtype=torch.float16, device="cuda")
    >>> q_p = torch.randn(500, 32, 128, dtype=torch.float16, device="cuda")
    >>> k_p, v_p = torch.randn(2, 500, 8, 128, dtype=torch.float16, device="cuda")
    >>> out_p, out_d = wrapper.run(q_p, k_p, v_p, q_d, cache, causal_p=True)
    """

    @flashinfer_constructor
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse("there are no variants of launches with two tiles", jit_args=jit_args)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._base: AttentionProblem | None = None  # the batch, as planned
        self._non_blocking = True
        self._pages = [torch.empty(0, dtype=torch.int32, device=self.device)]
        if not use_cuda_graph:
            return
        name = "paged_kv_last_page_len_buffer"
        last = check_buffer(name, paged_kv_last_page_len_buffer, torch.int32, self.device)
        name, buffer = "paged_kv_indptr_buffer", paged_kv_indptr_buffer
        indptr = check_buffer(name, buffer, torch.int32, self.device, last.numel() + 1)
        name = "paged_kv_indices_buffer"
        pages = check_buffer(name, paged_kv_indices_buffer, torch.int32, self.device)
        self._buffers = indptr, pages, last

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
        """Describe the batch that decodes, one query token per request.

        Parameters
        ----------
        indptr, indices, last_page_len : torch.Tensor
            The page table, as for ``BatchDecodeWithPagedKVCacheWrapper.plan``.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            As there; heads are those of the prefill, too.
        pos_encoding_mode, window_left, sm_scale, rope_scale, rope_theta
            As there; `run` has those of the prefill.
        q_data_type, kv_data_type : str or torch.dtype, optional
            float16, bfloat16, float8_e4m3fn or float8_e5m2; that, or one of the latter two. Also
            of the prefill.
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
        self._base = self._problems = self._key = None  # whatever becomes of this plan
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
        _, starts, _, last = host_page_table(
            None, indptr, last_page_len, None, page_size, ("qo_indptr", "indptr", "last_page_len")
        )
        requests = Requests(
            ArgumentNames.POD_DECODE,
            None,
            starts,
            last_page_len=last,
            page_size=page_size,
            window_left=spec.window_left,
        )
        tensors = PlanTensors(alibi_slopes=self._alibi_slopes(spec))
        problem = AttentionProblem(spec, requests, tensors)
        self._check_unchanged(problem)
        self._executor.check(problem)
        if self._buffers is None:
            pages = device_indices("indices", indices, self.device)
        else:
            pages = check_page_numbers("indices", indices, self._buffers[1], starts)
            check_fits("indptr", indptr, self._buffers[0])
        problem = AttentionProblem(spec, requests, tensors._replace(kv_indices=pages))
        self._non_blocking = non_blocking
        if self._captured_run is not None:  # a graph is replayed without coming to run()
            captured = self._captured_run
            self._plan_run((captured.problems[0], problem))
            self._key = captured.key
        if self._buffers is not None:
            starts_buffer, pages_buffer, last_buffer = self._buffers
            copy_to_buffer("indptr", indptr, starts_buffer, non_blocking)
            copy_to_buffer("indices", indices, pages_buffer, non_blocking)
            copy_to_buffer("last_page_len", last_page_len, last_buffer, non_blocking)
        self._base = problem

    begin_forward = plan

    @flashinfer_api(trace=pod_run_trace)
    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
        q_scale_p: float | torch.Tensor | None = None,
        k_scale_p: float | torch.Tensor | None = None,
        v_scale_p: float | torch.Tensor | None = None,
    ) -> tuple[Result, Result]:
        """Attention of the prefill and of the batch, for one layer.

        Parameters
        ----------
        q_p : torch.Tensor
            Queries of the prefill, ``[qo_len, num_qo_heads, head_dim]``, dtype as planned; last
            dimension contiguous, rows at multiples of 16 bytes.
        k_p, v_p : torch.Tensor
            Its keys and values, ``[kv_len, num_kv_heads, head_dim]`` (``"NHD"``) or
            ``[num_kv_heads, kv_len, head_dim]`` (``"HND"``), dtype as planned.
        q_d : torch.Tensor
            Queries of the batch, ``[batch_size, num_qo_heads, head_dim]``.
        paged_kv_cache_d : torch.Tensor or tuple of torch.Tensor
            Its keys and values, as for ``BatchDecodeWithPagedKVCacheWrapper.run``.
        custom_mask_p, custom_mask_d : torch.Tensor, optional
            Keys that are seen, bool: ``[qo_len, kv_len]``; the requests' ``[kv_len]`` one after
            the other. Only one of the two parts may have a mask. It takes the place of `causal_p`.
        packed_custom_mask_p, packed_custom_mask_d : torch.Tensor, optional
            The same as little-endian bits, each request from a new byte on, uint8.
        causal_p : bool
            Query i of the prefill sees keys up to ``i + kv_len - qo_len``.
        causal_d : bool
            The same for the batch, whose requests' only query sees all keys either way.
        kv_layout_p : str
            Layout of `k_p` and `v_p`.
        kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d
            The wrapper's layout and the planned options; the defaults mean the same.
        pos_encoding_mode_p, sm_scale_p, window_left_p, rope_scale_p, rope_theta_p
            Options of the prefill, whatever those of the batch: as for
            ``single_prefill_with_kv_cache``.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            Scales of quantised tensors of the decoding part: the first two multiply its logits, the
            last its outputs. On the device, float32, one number or a value per head.
        return_lse_p, return_lse_d : bool
            Whether log-sum-exps are returned, base 2.
        use_fp16_qk_reduction : bool
            False: logits are summed in float32.
        enable_pdl : bool, optional
            Programmatic dependent launch; None: where the GPU has it.
        *args
            None: there are no variants.
        q_scale_p, k_scale_p, v_scale_p : float or torch.Tensor, optional
            The same of the prefill.

        Returns
        -------
        tuple
            ``(out_p, out_d)``, shapes of the queries; in place of either ``(out, lse)`` where its
            log-sum-exps are wanted, ``[tokens, num_qo_heads]`` float32.

        Raises
        ------
        TypeError, ValueError
            If nothing is planned, or an argument is not as described.
        """
        call = locals()
        if args:
            raise TypeError(f"run() takes {len(args)} arguments too many: there is no `jit_args`")
        refuse("logits are summed in float32", use_fp16_qk_reduction=use_fp16_qk_reduction)
        cache_d = split_cache(paged_kv_cache_d, "paged_kv_cache_d")
        shapes = getattr(q_p, "shape", None), getattr(k_p, "shape", None)
        self._plan_for(
            (shapes, _prefill_options(call), _decode_options(call)),
            (custom_mask_p, packed_custom_mask_p, custom_mask_d, packed_custom_mask_d),
            lambda: self._problems_of(call),
        )
        if self._use_cuda_graph and torch.cuda.is_current_stream_capturing():
            self._note_capture()
        return self._launch_parts(
            (q_p, k_p, v_p),
            (q_d, *cache_d),
            ((q_scale_p, k_scale_p, v_scale_p), (q_scale, k_scale, v_scale)),
            (check_flag("return_lse_p", return_lse_p), check_flag("return_lse_d", return_lse_d)),
            enable_pdl,
        )

    @property
    def _planned_results(self) -> tuple[int, torch.dtype] | None:
        return results_of(self._base)

    def _problems_of(self, call: Mapping[str, Any]) -> Parts:
        """Both parts of a run with these arguments."""
        prefill, decode = _prefill_options(call), _decode_options(call)
        base = self._base
        if base is None:
            raise ValueError("plan() must be called before run(), and again after new workspaces")
        check_flag("causal_d", decode.causal)
        with named(kv_layout="kv_layout_p"):
            is_hnd(prefill.kv_layout)
        with named(kv_layout="kv_layout_d"):
            is_hnd(decode.kv_layout)
        planned = base.spec.kv_layout
        if decode.kv_layout == "HND" and decode.kv_layout != planned:
            raise ValueError(
                f"`kv_layout_d` must be the wrapper's {planned!r}, got {decode.kv_layout!r}"
            )
        check_planned_options(base.spec, decode.others, "d")
        first, second = self._prefill_problem(base, call["q_p"], call["k_p"], prefill), base
        mask, packed = call["custom_mask_p"], call["packed_custom_mask_p"]
        first = mask_of_part(first, "p", mask, packed, self.device)
        mask, packed = call["custom_mask_d"], call["packed_custom_mask_d"]
        second = mask_of_part(second, "d", mask, packed, self.device)
        if first.tensors.mask is not None and second.tensors.mask is not None:
            raise ValueError("`custom_mask_d` must be left out with `custom_mask_p`: one at a time")
        return first, second

    def _prefill_problem(
        self, base: AttentionProblem, q: torch.Tensor, k: torch.Tensor, options: PartOptions
    ) -> AttentionProblem:
        """The prefill of a run, whose keys are read as pages of the batch's size."""
        for name, tensor in (("q_p", q), ("k_p", k)):
            check_tensor(name, tensor, 3)
        kv_len = k.shape[1 if is_hnd(options.kv_layout) else 0]
        num_pages = -(-kv_len // base.requests.page_size)
        if len(self._pages[-1]) < num_pages:
            pages = torch.arange(2 * num_pages, dtype=torch.int32, device=self.device)
            self._pages.append(pages)  # a captured graph may read the shorter ones
        causal = check_flag("causal_p", options.causal)
        spec = with_run_options(base.spec, options.others, "p")
        spec = dataclasses.replace(spec, causal=causal, kv_layout=options.kv_layout)
        slopes = self._alibi_slopes(spec)
        requests = base.requests._replace(
            argument_names=ArgumentNames.POD_PREFILL,
            qo_indptr=_int32(0, q.shape[0]),
            kv_indptr=_int32(0, num_pages),
            kv_len=_int32(kv_len),
            last_page_len=None,
            causal=causal,
            window_left=spec.window_left,
        )
        tensors = PlanTensors(kv_indices=self._pages[-1], alibi_slopes=slopes, rows_as_pages=True)
        return AttentionProblem(spec, requests, tensors)

    def _plan_run(self, problems: Parts) -> None:
        capacity = None
        if self._buffers is not None:
            batch_size = self._buffers[2].numel()
            tokens = batch_size + problems[0].requests.num_qo_tokens
            capacity = GraphCapacity(batch_size + 1, tokens)
        self._plan_parts(problems, self._non_blocking, capacity)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
