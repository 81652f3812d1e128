"""Arguments of ``plan`` and ``workspace_size`` by their names, which both parse alike."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import torch

from .base import SpecArguments

R = TypeVar("R")
Plan = TypeVar("Plan", bound=Callable[..., Any])


def takes_arguments_of(
    plan: Callable[..., Any], without: str
) -> Callable[[Callable[[Any, Mapping[str, Any]], R]], Callable[..., R]]:
    """Give a method the parameters of `plan` but one; the method gets their values by name."""
    given = inspect.signature(plan).parameters
    accepted = inspect.Signature([p for n, p in given.items() if n not in ("self", without)])

    def decorate(method: Callable[[Any, Mapping[str, Any]], R]) -> Callable[..., R]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> R:
            bound = accepted.bind(*args, **kwargs)
            bound.apply_defaults()
            return method(self, bound.arguments)

        own = inspect.signature(method)
        parameters = [own.parameters["self"], *accepted.parameters.values()]
        call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


@dataclass(slots=True)
class DecodeArguments:
    """Arguments of ``BatchDecodeWithPagedKVCacheWrapper.plan``, documented there."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    pos_encoding_mode: str = "NONE"
    window_left: int = -1
    logits_soft_cap: float | None = None
    q_data_type: Any = "float16"
    kv_data_type: Any = None
    o_data_type: Any = None
    data_type: Any = None
    sm_scale: float | None = None
    rope_scale: float | None = None
    rope_theta: float | None = None
    non_blocking: bool = True
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    q_len_per_req: int = 1


_BATCH = ("indptr", "indices", "last_page_len", "block_tables", "seq_lens")
decode_options = operator.attrgetter(
    *(field.name for field in fields(DecodeArguments) if field.name not in _BATCH)
)
"""Everything of a plan but the batch, as a tuple."""


class PrefillArguments:
    """Arguments of a call of ``plan`` or ``workspace_size`` by their names; documented there.

    A method hands over its ``locals()``, so that the names stand in its signature and here only.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int | None
    custom_mask: torch.Tensor | None
    packed_custom_mask: torch.Tensor | None
    causal: bool
    pos_encoding_mode: str
    use_fp16_qk_reduction: bool
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    q_data_type: Any
    kv_data_type: Any
    o_data_type: Any
    prefix_len_ptr: torch.Tensor | None
    token_pos_in_items_ptr: torch.Tensor | None
    token_pos_in_items_len: int
    max_item_len_ptr: torch.Tensor | None
    seq_lens: torch.Tensor | None
    seq_lens_q: torch.Tensor | None
    max_token_per_sequence: int | None
    max_sequence_kv: int | None
    uniform_q_len: int | None
    fixed_split_size: int | None
    disable_split_kv: bool
    non_blocking: bool = True

    def __init__(self, call: Mapping[str, Any]) -> None:
        self.__dict__.update(call)

    def spec_arguments(self) -> SpecArguments:
        head_dim_vo = self.head_dim_qk if self.head_dim_vo is None else self.head_dim_vo
        return SpecArguments(
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            head_dim_vo,
            self.pos_encoding_mode,
            self.window_left,
            self.logits_soft_cap,
            self.sm_scale,
            self.rope_scale,
            self.rope_theta,
            self.q_data_type,
            self.kv_data_type,
            self.o_data_type,
            self.causal,
        )


class PagedArguments(PrefillArguments):
    """Arguments of ``plan`` with the page table."""

    qo_indptr: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    page_size: int
    block_tables: torch.Tensor | None


def takes_head_dim(plan: Plan) -> Plan:
    """Let callers say ``head_dim=`` for `head_dim_qk`, as FlashInfer once called it."""

    @functools.wraps(plan)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "head_dim" in kwargs:
            if "head_dim_qk" in kwargs:
                raise TypeError("`head_dim` and `head_dim_qk` are one argument: give one of them")
            kwargs["head_dim_qk"] = kwargs.pop("head_dim")
        return plan(*args, **kwargs)

    return cast(Plan, renamed)
