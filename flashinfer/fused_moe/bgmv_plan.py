"""`bgmv_moe` as a plan: fixed tensors, and a call without arguments."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from .._common import checks
from .._instrument.decorator import flashinfer_api, flashinfer_constructor
from ..compat.backends import BackendSupportedError
from .adapters import check_shape, expand_pairs, shrink_pairs
from .bgmv_moe import check_call, slice_starts


class BGMVMoEPortablePlan:
    """`bgmv_moe` with fixed tensors: memory for its steps, and a call without arguments.

    Equal runs give equal bits. A run launches kernels and waits for nothing, so that a CUDA graph
    can capture it; it reads the tensors anew.

    Attributes
    ----------
    backend_used : str
        ``"portable"``.
    schedule_id : None
        There are no schedules to choose from.
    fallback_reason : str
        Why there is no plan of generated kernels.

    Parameters
    ----------
    y_accum : torch.Tensor
        ``[tokens, columns of all slices]``, float32: receives the result of each run.
    shrink_out : torch.Tensor
        ``[slices, pairs, rank]``, float32: memory between the products.
    x, lora_a_weights, lora_b_weights, sorted_token_ids, expert_ids, lora_indices, topk_weights
        As for `bgmv_moe`.
    num_experts : int
        Experts.
    fallback_reason : str
        See the attribute.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as `bgmv_moe` says.
    """

    backend_used: ClassVar[str] = "portable"
    schedule_id: ClassVar[None] = None

    @flashinfer_constructor
    def __init__(
        self,
        *,
        y_accum: torch.Tensor,
        shrink_out: torch.Tensor,
        x: torch.Tensor,
        lora_a_weights: list[torch.Tensor],
        lora_b_weights: list[torch.Tensor],
        sorted_token_ids: torch.Tensor,
        expert_ids: torch.Tensor,
        lora_indices: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        fallback_reason: str,
    ) -> None:
        columns = check_call(
            x,
            lora_a_weights,
            lora_b_weights,
            sorted_token_ids,
            expert_ids,
            lora_indices,
            topk_weights,
            num_experts,
        )
        shape = len(columns), sorted_token_ids.shape[0], lora_a_weights[0].shape[2]
        check_shape("y_accum", y_accum, (x.shape[0], sum(columns)))
        check_shape("shrink_out", shrink_out, shape)
        for name, memory in (("y_accum", y_accum), ("shrink_out", shrink_out)):
            checks.dtype(name, memory.dtype, (torch.float32,))
        self.fallback_reason = fallback_reason
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = shrink_out, y_accum
        self._x, self._topk_weights = x, topk_weights
        self._weights = list(lora_a_weights), list(lora_b_weights)
        self._pairs = sorted_token_ids, expert_ids
        self._lora_indices = lora_indices
        self._starts = slice_starts(columns, x.device)

    @flashinfer_api
    def run(self) -> torch.Tensor:
        """The result, ``[tokens, columns of all slices]``, float32: memory of the plan.

        Raises
        ------
        RuntimeError
            After `close`.
        """
        if self._memory is None:
            raise RuntimeError("the plan was closed")
        between, result = (memory.zero_() for memory in self._memory)
        (first, second), (tokens, experts) = self._weights, self._pairs
        adapters, factors, starts = self._lora_indices, self._topk_weights, self._starts
        shrink_pairs(between, self._x, first, tokens, experts, adapters)
        expand_pairs(result, between, second, tokens, experts, factors, adapters, starts)
        return result

    def close(self) -> None:
        """Give up the memory; there is no run afterwards."""
        self._memory = None


@flashinfer_api
def prepare_bgmv_moe(
    x: torch.Tensor,
    lora_a_weights: list[torch.Tensor],
    lora_b_weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    backend: Literal["cake"] = "cake",
    fallback: bool = True,
    shrink_out: torch.Tensor | None = None,
    y_accum: torch.Tensor | None = None,
    grouped: bool | None = None,
    order_remap: bool | None = None,
) -> BGMVMoEPortablePlan:
    """A plan of `bgmv_moe` for fixed tensors, with memory of its own or of the caller.

    Parameters
    ----------
    x, lora_a_weights, lora_b_weights, sorted_token_ids, expert_ids, lora_indices, topk_weights
        As for `bgmv_moe`; the plan keeps them.
    num_experts : int
        Experts.
    backend : {"cake"}
        FlashInfer's generated kernels, which are not here.
    fallback : bool
        True: without them this library's kernels run.
    shrink_out : torch.Tensor, optional
        ``[slices, pairs, rank]``, float32; new memory if None.
    y_accum : torch.Tensor, optional
        ``[tokens, columns of all slices]``, float32; new memory if None.
    grouped, order_remap : None
        Choices among generated kernels.

    Returns
    -------
    BGMVMoEPortablePlan

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if `fallback` is False.
    """
    checks.choice("backend", backend, ("cake",))
    for name, value in (("grouped", grouped), ("order_remap", order_remap)):
        if value is not None:
            raise ValueError(f"`{name}` must be None: it chooses generated kernels, got {value!r}")
    reason = "FlashInfer's generated kernels are not in this library"
    if not checks.flag("fallback", fallback):
        raise BackendSupportedError(f"`fallback` must be True: {reason}")
    columns = check_call(
        x,
        lora_a_weights,
        lora_b_weights,
        sorted_token_ids,
        expert_ids,
        lora_indices,
        topk_weights,
        num_experts,
    )
    if shrink_out is None:
        shape = len(columns), sorted_token_ids.shape[0], lora_a_weights[0].shape[2]
        shrink_out = x.new_empty(shape, dtype=torch.float32)
    if y_accum is None:
        y_accum = x.new_empty((x.shape[0], sum(columns)), dtype=torch.float32)
    return BGMVMoEPortablePlan(
        y_accum=y_accum,
        shrink_out=shrink_out,
        x=x,
        lora_a_weights=lora_a_weights,
        lora_b_weights=lora_b_weights,
        sorted_token_ids=sorted_token_ids,
        expert_ids=expert_ids,
        lora_indices=lora_indices,
        topk_weights=topk_weights,
        num_experts=num_experts,
        fallback_reason=reason,
    )
