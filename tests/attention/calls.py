"""One call of any attention function or wrapper as data: what plan() gets and what run() gets.

A fault changes such a call so that it must be refused, by plan() or by run(), by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import flashinfer
from flashinfer.testing.tensors import clone_arguments, fill_with_poison, iter_tensors
from tests.attention.batches import Batch, check, indptr, ragged_kv, workspace
from tests.attention.packed import PACKED, packed_pages, packed_rows

WRAPPERS = {
    "decode": "BatchDecodeWithPagedKVCacheWrapper",
    "paged": "BatchPrefillWithPagedKVCacheWrapper",
    "ragged": "BatchPrefillWithRaggedKVCacheWrapper",
}
MIXED = {"mixed": "BatchAttention"}
FUNCTIONS = {
    "single_decode": "single_decode_with_kv_cache",
    "single_prefill": "single_prefill_with_kv_cache",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call: `make` for the wrapper's constructor, `plan` and `run` by argument name."""

    path: str
    make: dict[str, Any]
    plan: dict[str, Any]
    run: dict[str, Any]

    def planned(self) -> Any:
        wrapper = getattr(flashinfer, {**WRAPPERS, **MIXED}[self.path])(**self.make)
        wrapper.plan(**self.plan)
        return wrapper

    def check(self) -> None:
        """Make the call and compare everything with the reference."""
        if self.path in FUNCTIONS:
            check(getattr(flashinfer, FUNCTIONS[self.path]), **self.run)
        else:
            wrapper = self.planned()
            check(type(wrapper).run, self=wrapper, **self.run)

    def make_it(self) -> Any:
        if self.path in FUNCTIONS:
            return getattr(flashinfer, FUNCTIONS[self.path])(**self.run)
        return self.planned().run(**self.run)

    def with_plan(self, **changes: Any) -> Call:
        return dataclasses.replace(self, plan={**self.plan, **changes})

    def with_run(self, **changes: Any) -> Call:
        return dataclasses.replace(self, run={**self.run, **changes})

    def with_make(self, **changes: Any) -> Call:
        return dataclasses.replace(self, make={**self.make, **changes})


def make_call(path: str, batch: Batch, device: torch.device, **options: Any) -> Call:
    """A call of `path` with the tensors of `batch`; `options` are further arguments of plan().

    A function without plan takes them as its arguments. Keys of 4 bits come with their scales.
    """
    is_packed = batch.stored == PACKED
    heads = {"num_qo_heads": batch.num_qo_heads, "num_kv_heads": batch.num_kv_heads}
    make = {"float_workspace_buffer": workspace(device), "kv_layout": batch.kv_layout}
    q = batch.query(device)
    if path in FUNCTIONS or path == "ragged":
        rows = packed_rows(batch, device) if is_packed else None
        kv = rows or dict(zip("kv", ragged_kv(batch, device), strict=True))
    if path in FUNCTIONS:
        q = q[0] if path == "single_decode" else q
        arguments = {"q": q, **kv, "kv_layout": batch.kv_layout}
        return Call(path, {}, {}, {**arguments, **options})
    if path == "ragged":
        lengths = {"qo_indptr": indptr(batch.qo_lens), "kv_indptr": indptr(batch.kv_lens)}
        dims = {"head_dim_qk": batch.head_dim_qk, "head_dim_vo": batch.head_dim_vo}
        plan = {**lengths, **heads, **dims, **batch.dtypes(), **options}
        return Call(path, make, plan, {"q": q, **kv})
    pages = packed_pages(batch, device) if is_packed else {"paged_kv_cache": batch.cache(device)}
    run = {**pages, "q": q}
    starts, indices, last, _ = batch.table()
    indices = indices.to(device)
    if path == "mixed":
        lengths = torch.tensor(batch.kv_lens, dtype=torch.int32)
        table = {"qo_indptr": indptr(batch.qo_lens), "kv_indptr": starts, "kv_indices": indices}
        dims = {"head_dim_qk": batch.head_dim_qk, "head_dim_vo": batch.head_dim_vo}
        plan = {**table, "kv_len_arr": lengths, **heads, **dims, "page_size": batch.page_size}
        make = {"kv_layout": batch.kv_layout, "device": str(device)}
        run["kv_cache"] = run.pop("paged_kv_cache")
        return Call(path, make, {**plan, **batch.dtypes(), **options}, run)
    if path == "decode":
        table = {"indptr": starts, "indices": indices, "last_page_len": last}
        dims = {"head_dim": batch.head_dim_qk, "page_size": batch.page_size}
    else:
        table = {
            "qo_indptr": indptr(batch.qo_lens),
            "paged_kv_indptr": starts,
            "paged_kv_indices": indices,
            "paged_kv_last_page_len": last,
        }
        dims = {
            "head_dim_qk": batch.head_dim_qk,
            "head_dim_vo": batch.head_dim_vo,
            "page_size": batch.page_size,
        }
    return Call(path, make, {**table, **heads, **dims, **batch.dtypes(), **options}, run)


Fault = Callable[[Call], "Call | None"]


def refusal_of(call: Call, names: tuple[str, ...]) -> str:
    """The message with which a call is refused; it has one of `names`, and nothing is written."""
    arguments = {**call.plan, **call.run}
    for name in ("out", "lse"):
        if isinstance(arguments.get(name), torch.Tensor):
            fill_with_poison(arguments[name])
    before = clone_arguments(arguments)
    try:
        call.make_it()
    except (TypeError, ValueError) as error:
        message = str(error)
    else:
        raise AssertionError("accepted, but must be refused")
    assert any(name in message for name in names), f"the message names none of {names}: {message}"
    for old, new in zip(iter_tensors(before), iter_tensors(arguments), strict=True):
        same = [t.contiguous().view(-1).view(torch.uint8) for t in (old, new)]
        assert torch.equal(*same), "refused, but something was written"
    return message


# ---- faults --------------------------------------------------------------------------------------


def plan_is(name: str, value: Any) -> Fault:
    """plan() gets `value`, if it has such an argument."""
    return lambda call: call.with_plan(**{name: value}) if name in call.plan else None


def option_is(name: str, value: Any) -> Fault:
    """An option that every path has: an argument of plan(), or of the function."""

    def fault(call: Call) -> Call:
        return (call.with_run if call.path in FUNCTIONS else call.with_plan)(**{name: value})

    return fault


def run_is(name: str, value: Any) -> Fault:
    return lambda call: call.with_run(**{name: value})


def plan_tensor(change: Callable[[torch.Tensor], torch.Tensor | None], *names: str) -> Fault:
    """The first of `names` that plan() has, changed."""

    def fault(call: Call) -> Call | None:
        for name in names:
            if isinstance(call.plan.get(name), torch.Tensor):
                changed = change(call.plan[name])
                return None if changed is None else call.with_plan(**{name: changed})
        return None

    return fault


def run_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Fault:
    def fault(call: Call) -> Call | None:
        if not isinstance(call.run.get(name), torch.Tensor):
            return None
        changed = change(call.run[name])
        return None if changed is None else call.with_run(**{name: changed})

    return fault


def keys(change: Callable[[torch.Tensor], torch.Tensor | None], index: int = 0) -> Fault:
    """The keys (or values, with `index` 1), wherever the call has them."""

    def fault(call: Call) -> Call | None:
        cache = call.run.get("paged_kv_cache")
        if cache is None:
            return run_tensor("kv"[index], change)(call)
        if isinstance(cache, torch.Tensor):
            return None
        changed = change(cache[index])
        parts = list(cache)
        parts[index] = changed
        return None if changed is None else call.with_run(paged_kv_cache=tuple(parts))

    return fault


def not_float_dtype(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor | None]:
    return lambda tensor: None if tensor.dtype == dtype else tensor.float().to(dtype)


def gappy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Every second element of a wider tensor."""
    if tensor.numel() == 0:
        return None
    wide = torch.cat([tensor.float(), tensor.float()], -1).to(tensor.dtype)
    return wide[..., ::2]
