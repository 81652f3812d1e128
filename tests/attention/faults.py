"""Faults that any attention call must be refused for, and what the message must name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.attention.calls import (
    FUNCTIONS,
    Call,
    Fault,
    gappy,
    keys,
    not_float_dtype,
    option_is,
    plan_is,
    plan_tensor,
    run_is,
    run_tensor,
)


@dataclass(frozen=True)
class NamedFault:
    """`change` gives the faulty call, None where it does not apply; a message has a `name`."""

    change: Fault
    names: tuple[str, ...]


_INDPTR = ("indptr", "paged_kv_indptr", "kv_indptr")
_LAST = ("last_page_len", "paged_kv_last_page_len")
_INDICES = ("indices", "paged_kv_indices")
_MASK = ("custom_mask",)  # its size is that of the lengths
_DIM = ("head_dim", "head_dim_qk")
_KEYS = ("`k`", "k_cache", "paged_kv_cache", "kv_cache")
_VALUES = ("`v`", "v_cache", "paged_kv_cache", "kv_cache")


def _last_entry(change: int) -> Fault:
    def moved(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.numel() < 2:
            return None
        changed = tensor.clone()
        changed[-1] += change
        return changed

    return plan_tensor(moved, *_INDPTR)


def _decreasing(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.numel() < 3 or int(tensor[-1]) == 0:
        return None
    changed = tensor.clone()
    changed[1] = changed[-1] + 1
    return changed


def _out_with(dtype: torch.dtype, rows: int = 0) -> Fault:
    """An `out` of another dtype, or of other rows."""

    def fault(call: Call) -> Call | None:
        if call.path in FUNCTIONS:
            return None
        q = call.run["q"]
        if rows == 0 and dtype == call.plan.get("o_data_type", q.dtype):
            return None
        head_dim = call.plan.get("head_dim_vo", call.plan.get("head_dim"))
        chosen = call.plan.get("o_data_type", q.dtype) if rows else dtype
        shape = (len(q) + rows, q.shape[1], head_dim)
        return call.with_run(out=torch.empty(shape, dtype=chosen, device=q.device))

    return fault


def _lse_with(dtype: torch.dtype, rows: int = 0) -> Fault:
    def fault(call: Call) -> Call | None:
        if call.path in FUNCTIONS:
            return None
        q = call.run["q"]
        shape = (len(q) + rows, q.shape[1])
        lse = torch.empty(shape, dtype=dtype, device=q.device)
        return call.with_run(lse=lse, return_lse=True)

    return fault


def _sinks(dtype: torch.dtype, more: int) -> Fault:
    def fault(call: Call) -> Call | None:
        if call.path not in ("decode", "paged"):
            return None
        q = call.run["q"]
        return call.with_run(sinks=torch.zeros(q.shape[1] + more, dtype=dtype, device=q.device))

    return fault


def _has_bits(call: Call) -> bool:
    """Whether there is a packed mask, beside which a mask of bools is not looked at."""
    return "packed_custom_mask" in {**call.plan, **call.run}


def _mask_of_size(more: int) -> Fault:
    def fault(call: Call) -> Call | None:
        if "decode" in call.path or _has_bits(call):
            return None
        mask = torch.ones(10**6 + more, dtype=torch.bool, device=call.run["q"].device)
        return option_is("custom_mask", mask)(call)

    return fault


def _one_head_more(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros((*tensor.shape[:-2], tensor.shape[-2] + 1, tensor.shape[-1]))


def _longer_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 16))


def _of(change: Fault, *names: str) -> NamedFault:
    return NamedFault(change, names)


FAULTS: dict[str, NamedFault] = {
    "no KV heads": _of(plan_is("num_kv_heads", 0), "num_kv_heads"),
    "heads that do not divide": _of(plan_is("num_kv_heads", 7919), "num_kv_heads", "num_qo_heads"),
    "negative heads": _of(plan_is("num_qo_heads", -8), "num_qo_heads"),
    "heads as float": _of(plan_is("num_qo_heads", 8.0), "num_qo_heads"),
    "head size 24": _of(lambda c: plan_is(_dim(c), 24)(c), *_DIM),
    "head size 0": _of(lambda c: plan_is(_dim(c), 0)(c), *_DIM),
    "head size 1024": _of(lambda c: plan_is(_dim(c), 1024)(c), *_DIM),
    "page size 0": _of(plan_is("page_size", 0), "page_size"),
    "page size as text": _of(plan_is("page_size", "16"), "page_size"),
    "indptr of floats": _of(plan_tensor(lambda t: t.float(), *_INDPTR), *_INDPTR),
    "indptr of bytes": _of(plan_tensor(lambda t: t.to(torch.uint8), *_INDPTR), *_INDPTR),
    "indptr as list": _of(lambda c: plan_is(_first(c, _INDPTR), [0, 1])(c), *_INDPTR),
    "indptr with two dimensions": _of(plan_tensor(lambda t: t[None], *_INDPTR), *_INDPTR),
    "indptr not monotone": _of(plan_tensor(_decreasing, *_INDPTR), *_INDPTR, *_LAST, *_MASK),
    "indptr beyond the page numbers": _of(
        _last_entry(100), *_INDPTR, *_INDICES, *_LAST, *_KEYS, *_MASK
    ),
    "page numbers of floats": _of(plan_tensor(lambda t: t.float(), *_INDICES), *_INDICES),
    "page numbers in a matrix": _of(plan_tensor(lambda t: t[None], *_INDICES), *_INDICES),
    "last page of floats": _of(plan_tensor(lambda t: t.float(), *_LAST), *_LAST),
    "last page longer than a page": _of(
        plan_tensor(lambda t: t + 101 if t.numel() else None, *_LAST), *_LAST
    ),
    "one last page too many": _of(
        plan_tensor(lambda t: torch.cat([t, t.new_ones(1)]), *_LAST), *_LAST
    ),
    "unknown encoding": _of(option_is("pos_encoding_mode", "ROPE"), "pos_encoding_mode"),
    "encoding as number": _of(option_is("pos_encoding_mode", 1), "pos_encoding_mode"),
    "scale not finite": _of(option_is("sm_scale", float("nan")), "sm_scale"),
    "scale infinite": _of(option_is("sm_scale", float("inf")), "sm_scale"),
    "scale as text": _of(option_is("sm_scale", "1"), "sm_scale"),
    "soft cap of a text": _of(option_is("logits_soft_cap", "1"), "logits_soft_cap"),
    "soft cap not finite": _of(option_is("logits_soft_cap", float("inf")), "logits_soft_cap"),
    "window as float": _of(option_is("window_left", 1.5), "window_left"),
    "window below -1": _of(option_is("window_left", -2), "window_left"),
    "rope_scale zero": _of(option_is("rope_scale", 0.0), "rope_scale"),
    "rope_theta negative": _of(option_is("rope_theta", -1.0), "rope_theta"),
    "queries in float32": _of(plan_is("q_data_type", torch.float32), "q_data_type"),
    "keys in int8": _of(plan_is("kv_data_type", torch.int8), "kv_data_type"),
    "unknown dtype": _of(plan_is("q_data_type", "float17"), "q_data_type"),
    "split size 0": _of(lambda c: _wrapper_option(c, "fixed_split_size", 0), "fixed_split_size"),
    "split flag as number": _of(
        lambda c: _wrapper_option(c, "disable_split_kv", 1), "disable_split_kv"
    ),
    "mask of another size": _of(_mask_of_size(7), "custom_mask"),
    "mask of floats": _of(
        lambda c: (
            None
            if "decode" in c.path or _has_bits(c)
            else option_is("custom_mask", torch.ones(4, device=c.run["q"].device))(c)
        ),
        "custom_mask",
    ),
    "one query too many": _of(lambda call: _queries(call, 1), "`q`"),
    "queries of another dtype": _of(
        run_tensor("q", not_float_dtype(torch.float32)), "`q`", "q_data_type", "`k`"
    ),
    "queries with a head more": _of(
        lambda call: _query_head_more(call), "`q`", "num_qo_heads", "`k`"
    ),
    "queries with longer rows": _of(run_tensor("q", _longer_rows), "`q`", "`k`", "head_dim"),
    "queries with gaps": _of(run_tensor("q", gappy), "`q`"),
    "queries as list": _of(run_is("q", [1.0]), "`q`"),
    "keys of another dtype": _of(keys(not_float_dtype(torch.float32)), *_KEYS),
    "keys with a head more": _of(keys(_one_head_more), *_KEYS, *_VALUES),
    "keys with longer rows": _of(keys(_longer_rows), *_KEYS, "`q`", "head_dim"),
    "keys with gaps": _of(keys(gappy), *_KEYS),
    "values of another dtype": _of(keys(not_float_dtype(torch.float32), 1), *_VALUES),
    "values with a head more": _of(keys(_one_head_more, 1), *_VALUES),
    "values with gaps": _of(keys(gappy, 1), *_VALUES),
    "out of another dtype": _of(_out_with(torch.float32), "`out`"),
    "out with a row more": _of(_out_with(torch.float16, 1), "`out`"),
    "lse of another dtype": _of(_lse_with(torch.float16), "`lse`"),
    "lse with a row more": _of(_lse_with(torch.float32, 1), "`lse`"),
    "sinks of another dtype": _of(_sinks(torch.float16, 0), "sinks"),
    "a sink too many": _of(_sinks(torch.float32, 1), "sinks"),
    "k_scale not finite": _of(run_is("k_scale", float("nan")), "k_scale"),
    "v_scale as text": _of(run_is("v_scale", "2"), "v_scale"),
}


def _dim(call: Call) -> str:
    return _first(call, _DIM)


def _first(call: Call, names: tuple[str, ...]) -> str:
    """The first of `names` that plan() has here."""
    return next((name for name in names if name in call.plan), names[0])


def _wrapper_option(call: Call, name: str, value: object) -> Call | None:
    return None if call.path in FUNCTIONS else call.with_plan(**{name: value})


def _query_head_more(call: Call) -> Call | None:
    """One query head more, unless a function without plan can take that for another group."""
    if call.path in FUNCTIONS:
        heads_dim = -2 if call.run["kv_layout"] == "NHD" else 0
        if (call.run["q"].shape[-2] + 1) % call.run["k"].shape[heads_dim] == 0:
            return None
    return run_tensor("q", _one_head_more)(call)


def _queries(call: Call, more: int) -> Call | None:
    """More queries than were planned."""
    q = call.run["q"]
    if call.path in FUNCTIONS:
        return None
    return call.with_run(q=torch.cat([q, q.new_zeros(more, *q.shape[1:])]))
