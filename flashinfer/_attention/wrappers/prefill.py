"""The base of the paged and the ragged prefill wrapper."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..backends import check_lse_base, check_lse_layout
from ..checks import refuse
from ..index_tensors import check_buffer, check_fits, copy_to_buffer, host_indices
from ..plan.launch import GraphCapacity, PlanOptions
from ..plan.masks import make_items, make_mask
from ..plan.requests import AttentionProblem, CustomMask, PlanTensors, Requests
from ..plan.spec import AttentionSpec
from .base import AttentionWrapper, option_of_plan
from .plan_arguments import PrefillArguments

LN_2 = math.log(2.0)


class PrefillWrapper(AttentionWrapper):
    """Base of the prefill wrappers."""

    _causal = option_of_plan("causal")

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        custom_mask_buf: torch.Tensor | None,
        mask_indptr_buf: torch.Tensor | None,
        qo_indptr_buf: torch.Tensor | None,
        backend: str,
        jit_args: list[Any] | None,
        jit_kwargs: dict[str, Any] | None,
        variant_owns_mask: bool,
    ) -> None:
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs
        )
        if check_flag("variant_owns_mask", variant_owns_mask) and jit_args is None:
            raise ValueError("`variant_owns_mask` must be False without `jit_args`, got True")
        if self._jit_kwargs.get("use_fp16_qk_reduction") or self._jit_kwargs.get("fp8_enabled"):
            raise ValueError(
                "`jit_kwargs`: use_fp16_qk_reduction and fp8_enabled must be False: queries are "
                "of 16 bits and logits are summed in float32"
            )
        self._variant_owns_mask = variant_owns_mask
        self._qo_indptr_buf = self._custom_mask_buf = self._mask_indptr_buf = None
        self._max_qo_tokens = 0
        self._pending: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # for buffers of a graph
        if not use_cuda_graph:
            return
        self._qo_indptr_buf = check_buffer("qo_indptr_buf", qo_indptr_buf, torch.int32, self.device)
        if (custom_mask_buf is None) != (mask_indptr_buf is None):
            raise ValueError("`custom_mask_buf` and `mask_indptr_buf` must be given together")
        if custom_mask_buf is not None:
            self._custom_mask_buf = check_buffer(
                "custom_mask_buf", custom_mask_buf, torch.uint8, self.device
            )
            self._mask_indptr_buf = check_buffer(
                "mask_indptr_buf",
                mask_indptr_buf,
                torch.int32,
                self.device,
                self._qo_indptr_buf.numel(),
            )

    @property
    def _max_total_num_rows(self) -> int | None:
        """Query rows that a CUDA graph has room for; None before its first plan."""
        return self._max_qo_tokens or None

    @_max_total_num_rows.setter
    def _max_total_num_rows(self, rows: int | None) -> None:
        self._max_qo_tokens = rows or 0

    @property
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        """Nothing: the planner has a host buffer of its own. Engines pass this one around."""
        return torch.empty(0, dtype=torch.uint8)

    # --- Planning -----------------------------------------------------------------------------

    def _prefill_spec(self, a: PrefillArguments) -> AttentionSpec:
        _check_fp16_reduction(a.use_fp16_qk_reduction)
        arguments = a.spec_arguments()
        if self._variant_owns_mask:
            refuse(
                "with `variant_owns_mask` the variant's LogitsMask alone decides",
                causal=check_flag("causal", a.causal),
                custom_mask=a.custom_mask,
                packed_custom_mask=a.packed_custom_mask,
                prefix_len_ptr=a.prefix_len_ptr,
                window_left=a.window_left if a.window_left >= 0 else None,
            )
        return self._spec(arguments)

    def _prefill_problem(
        self, a: PrefillArguments, spec: AttentionSpec, requests: Requests
    ) -> AttentionProblem:
        """The problem of a plan, without page numbers. Masks may launch kernels."""
        if (
            a.seq_lens_q is not None
            or a.max_token_per_sequence is not None
            or a.max_sequence_kv is not None
            or a.uniform_q_len is not None
        ):
            _check_hints(requests, a)
        tensors = PlanTensors(alibi_slopes=self._alibi_slopes(spec))
        return self._with_mask(AttentionProblem(spec, requests, tensors), a)

    def _with_mask(self, problem: AttentionProblem, a: PrefillArguments) -> AttentionProblem:
        """`problem` with the mask of a plan, whose copies to a graph's buffers become pending."""
        self._pending = []
        has_mask = a.custom_mask is not None or a.packed_custom_mask is not None
        has_items = not (
            a.prefix_len_ptr is None
            and a.token_pos_in_items_ptr is None
            and a.max_item_len_ptr is None
        )
        if a.token_pos_in_items_len and not has_items:
            raise ValueError(
                "`token_pos_in_items_len` must be 0 without `prefix_len_ptr` and its like, got "
                f"{a.token_pos_in_items_len}"
            )
        if has_mask and has_items:
            raise ValueError("`custom_mask` and `prefix_len_ptr` exclude each other")
        if has_mask:
            return problem.with_mask(self._custom_mask(problem.requests, a))
        if self._custom_mask_buf is not None:
            raise ValueError("`custom_mask` must be given: the wrapper has `custom_mask_buf`")
        if not has_items:
            return problem
        items = make_items(
            problem.requests.batch_size,
            a.prefix_len_ptr,
            a.token_pos_in_items_ptr,
            a.token_pos_in_items_len,
            a.max_item_len_ptr,
            self.device,
        )
        return problem.with_mask(items)

    def _custom_mask(self, requests: Requests, a: PrefillArguments) -> CustomMask:
        bits, indptr = self._custom_mask_buf, self._mask_indptr_buf
        if self._use_cuda_graph and bits is None:
            raise ValueError(
                "`custom_mask` needs `custom_mask_buf` and `mask_indptr_buf` with CUDA graphs"
            )
        may_be_longer = bits is not None
        mask = make_mask(requests, a.custom_mask, a.packed_custom_mask, self.device, may_be_longer)
        if bits is None or indptr is None:
            return mask
        check_fits("custom_mask", mask.bits, bits)
        check_fits("mask_indptr", mask.indptr, indptr)
        self._pending = [("custom_mask", mask.bits, bits), ("mask_indptr", mask.indptr, indptr)]
        return CustomMask(bits, indptr)

    def _prefill_options(self, a: PrefillArguments, requests: Requests) -> PlanOptions:
        """How a plan is divided; a graph has room for the query tokens of its first plan."""
        options = self._check_plan_options(a.fixed_split_size, a.disable_split_kv, a.non_blocking)
        if self._qo_indptr_buf is None:
            return options
        tokens = self._max_qo_tokens or requests.num_qo_tokens
        return options._replace(capacity=GraphCapacity(self._qo_indptr_buf.numel() - 1, tokens))

    def _copy_to_buffers(
        self, options: PlanOptions, *copies: tuple[str, Any, torch.Tensor | None]
    ) -> None:
        """Fill the buffers of a CUDA graph, when its plan has succeeded."""
        if options.capacity is None:
            return
        self._max_qo_tokens = options.capacity.qo_tokens
        for name, values, buffer in (*copies, *self._pending):
            if buffer is not None:
                copy_to_buffer(name, values, buffer, options.non_blocking)

    def _override_prefill(self, use_fp16_qk_reduction: bool, **options: Any) -> None:
        """Options of the deprecated ``forward``."""
        _check_fp16_reduction(use_fp16_qk_reduction)
        self._override(**options)

    # --- Running ------------------------------------------------------------------------------

    def _launch_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        args: tuple[Any, ...],
        *,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
        lse_layout: str,
        **options: Any,
    ) -> Any:
        """`_launch` with other forms of log-sum-exps: the kernel writes [tokens, heads], base 2."""
        if lse_base != "log2" or lse_layout != "NH":
            check_lse_base(lse_base)
            check_lse_layout(lse_layout)
            check_flag("return_lse", return_lse)
        else:
            return self._launch(q, k, v, args, lse=lse, return_lse=return_lse, **options)
        if lse is None and not return_lse:
            return self._launch(q, k, v, args, lse=None, return_lse=False, **options)
        if lse is not None:
            tokens, heads = q.shape[:2]
            shape = (heads, tokens) if lse_layout == "HN" else (tokens, heads)
            if lse.dtype != torch.float32 or lse.shape != shape:
                raise ValueError(
                    f"`lse` must be float32 of shape {list(shape)}, got "
                    f"{str(lse.dtype).removeprefix('torch.')} of shape {list(lse.shape)}"
                )
        out, base2 = self._launch(q, k, v, args, lse=None, return_lse=True, **options)
        result = base2.t() if lse_layout == "HN" else base2
        if lse_base == "ln":
            result = result * LN_2
        result = result.contiguous() if lse is None else lse.copy_(result)
        return (out, result) if return_lse else out


def _check_fp16_reduction(use_fp16_qk_reduction: bool) -> None:
    if check_flag("use_fp16_qk_reduction", use_fp16_qk_reduction):
        raise ValueError(
            "`use_fp16_qk_reduction` must be False, got True: logits are summed in float32"
        )


def _check_hints(requests: Requests, a: PrefillArguments) -> None:
    """What callers say of the lengths besides the index tensors has to be true."""
    qo_lengths = requests.qo_lengths()
    longest = int(qo_lengths.max()) if len(qo_lengths) else 0
    if a.seq_lens_q is not None:
        (given,) = host_indices({"seq_lens_q": a.seq_lens_q})
        if not torch.equal(given, qo_lengths):
            raise ValueError("`seq_lens_q` must be the lengths that `qo_indptr` says")
    if a.max_token_per_sequence is not None:
        check_count("max_token_per_sequence", a.max_token_per_sequence, longest)
    if a.max_sequence_kv is not None:
        kv_lengths = requests.kv_lengths()
        check_count(
            "max_sequence_kv", a.max_sequence_kv, int(kv_lengths.max()) if len(kv_lengths) else 0
        )
    if a.uniform_q_len is not None:
        check_count("uniform_q_len", a.uniform_q_len, 0)
        if not bool((qo_lengths == a.uniform_q_len).all()):
            raise ValueError(
                f"`uniform_q_len` must be every request's query length, got {a.uniform_q_len}"
            )
