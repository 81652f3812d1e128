"""Appends to paged caches under random dtypes, page sizes, layouts, strides and page tables."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import page
from tests.fuzzing import (
    LAYOUTS,
    Family,
    Fault,
    Layout,
    check_fault,
    empty_in_layout,
    expanded,
    longer,
    one_row_more,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)

STORED = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
)
APPENDS = ("append_paged_kv_cache", "append_paged_mla_kv_cache")
FUNCTIONS = (*APPENDS, "get_batch_indices_positions", "get_seq_lens")


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    lengths: tuple[int, ...]  # of the requests, before the append
    added: tuple[int, ...]  # tokens of each request that are appended
    padding: int
    spare_pages: int
    page_size: int
    heads: int
    dims: tuple[int, int]
    kv_layout: str
    cache: str  # "fused", "pair", "views" of a fused cache, or "columns" (latent attention)
    layouts: tuple[Layout, Layout]
    given: bool  # results of get_batch_indices_positions are given
    spoiled: bool  # some entries of the page table lead nowhere
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch_size = draw(st.sampled_from([0, 1, 1, 2, 5, 17]))
    counts = st.integers(0, 30)
    lengths = draw(st.lists(counts, min_size=batch_size, max_size=batch_size))
    added = draw(st.lists(st.integers(0, 6), min_size=batch_size, max_size=batch_size))
    dims = st.sampled_from([0, 1, 2, 7, 16, 20, 64, 128, 128, 130, 512])
    return Case(
        function=draw(st.sampled_from((*FUNCTIONS, *APPENDS, APPENDS[0]))),
        dtype=draw(st.sampled_from(STORED)),
        lengths=tuple(lengths),
        added=tuple(added),
        padding=draw(st.sampled_from([0, 0, 1, 9])),
        spare_pages=draw(st.integers(0, 3)),
        page_size=draw(st.sampled_from([1, 2, 3, 5, 8, 16, 64])),
        heads=draw(st.sampled_from([0, 1, 2, 3, 8])),
        dims=(draw(dims), draw(dims)),
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        cache=draw(st.sampled_from(["fused", "pair", "views"])),
        layouts=draw(st.tuples(LAYOUTS, LAYOUTS)),
        given=draw(st.booleans()),
        spoiled=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = torch.randint(-100, 100, tensor.shape, generator=generator) / 8
    return tensor.copy_((values.abs() if tensor.dtype == torch.uint8 else values).to(tensor.dtype))


def _page_table(case: Case, device: torch.device) -> tuple[dict[str, torch.Tensor], int]:
    """Index tensors, and how many pages the cache has."""
    generator = torch.Generator().manual_seed(case.seed)
    totals = [old + new for old, new in zip(case.lengths, case.added, strict=True)]
    counts = torch.tensor([-(-total // case.page_size) for total in totals], dtype=torch.int64)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    num_pages = int(indptr[-1]) + case.spare_pages
    indices = torch.randperm(num_pages, generator=generator)[: int(indptr[-1])]
    batch = [b for b, new in enumerate(case.added) for _ in range(new)] + [-1] * case.padding
    position = [
        old + i for old, new in zip(case.lengths, case.added, strict=True) for i in range(new)
    ] + [0] * case.padding
    table = {
        "batch_indices": torch.tensor(batch, dtype=torch.int32),
        "positions": torch.tensor(position, dtype=torch.int32),
        "kv_indices": indices.int(),
        "kv_indptr": indptr.int(),
        "kv_last_page_len": torch.tensor(
            [(total - 1) % case.page_size + 1 if total else 0 for total in totals],
            dtype=torch.int32,
        ),
    }
    if case.spoiled and batch:
        table["batch_indices"][case.seed % len(batch)] = case.seed % 3 * 1000 - 1
        table["positions"][case.seed // 7 % len(batch)] = (-1, 2**31 - 1, 4000)[case.seed % 3]
        if len(indices):
            table["kv_indices"][case.seed % len(indices)] = (-1, 10**9, num_pages)[case.seed % 3]
    return {name: tensor.to(device) for name, tensor in table.items()}, num_pages


def _rows(shape: tuple[int, ...], layout: Layout, case: Case, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    empty = empty_in_layout(shape, layout, case.dtype, device)
    return empty.copy_(_fill(torch.empty(shape, dtype=case.dtype), generator))


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    table, num_pages = _page_table(case, device)
    if case.function == "get_seq_lens":
        names = "kv_indptr", "kv_last_page_len"
        return {**{name: table[name] for name in names}, "page_size": case.page_size}
    num_tokens = len(table["positions"])
    if case.function == "get_batch_indices_positions":
        added = torch.tensor([0, *case.added]).cumsum(0).int()
        totals = torch.tensor(case.lengths).int() + torch.tensor(case.added).int()
        arguments = {"append_indptr": added.to(device), "seq_lens": totals.to(device)}
        if case.given:
            empty = torch.empty(2, num_tokens, dtype=torch.int32, device=device)
            arguments["batch_indices"], arguments["positions"] = empty
        return {**arguments, "nnz": num_tokens}
    source, target = case.layouts
    if case.function == "append_paged_mla_kv_cache":
        ckv, kpe = case.dims
        pages = (num_pages, case.page_size)
        both = _rows((*pages, ckv + kpe), target, case, device)
        columns = case.cache == "views"
        return {
            "append_ckv": _rows((num_tokens, ckv), source, case, device),
            "append_kpe": _rows((num_tokens, kpe), target, case, device),
            "ckv_cache": both[..., :ckv] if columns else _rows((*pages, ckv), source, case, device),
            "kpe_cache": both[..., ckv:] if columns else _rows((*pages, kpe), target, case, device),
            **table,
        }
    dim = case.dims[0]
    inner = (
        (case.page_size, case.heads) if case.kv_layout == "NHD" else (case.heads, case.page_size)
    )
    rows = (num_tokens, case.heads, dim)
    if case.cache == "pair":
        cache: Any = tuple(
            _rows((num_pages, *inner, dim), layout, case, device) for layout in case.layouts
        )
    else:
        cache = _rows((num_pages, 2, *inner, dim), Layout(target.offset, target.gap), case, device)
        cache = tuple(cache.unbind(1)) if case.cache == "views" else cache
    return {
        "append_key": _rows(rows, source, case, device),
        "append_value": _rows(rows, target, case, device)
        if case.dtype != torch.uint8
        else _rows(rows, source, case, device),
        "paged_kv_cache": cache,
        "kv_layout": case.kv_layout,
        **table,
    }


def _cache_fault(change: Any) -> Fault:
    """Fault in the first cache of `append_paged_kv_cache`."""

    def fault(arguments: dict[str, Any]) -> dict[str, Any] | None:
        cache = arguments.get("paged_kv_cache")
        if cache is None:
            return None
        first = cache[0] if isinstance(cache, tuple) else cache
        changed = change(first)
        if changed is None:
            return None
        whole = (changed, cache[1]) if isinstance(cache, tuple) else changed
        return {**arguments, "paged_kv_cache": whole}

    return fault


def _index_faults(name: str) -> dict[str, Fault]:
    return {
        f"{name} of floats": replace(name, lambda t: t.float()),
        f"{name} floating": replace(name, with_dtype(torch.float32)),
        f"{name} two-dimensional": replace(name, lambda t: t[None]),
        f"{name} strided": replace(name, strided),
        f"{name} missing": put(name, None),
    }


def _same_cache_twice(arguments: dict[str, Any]) -> dict[str, Any] | None:
    cache = arguments.get("paged_kv_cache")
    if not isinstance(cache, tuple) or cache[0].numel() == 0:
        return None
    return {**arguments, "paged_kv_cache": (cache[0], cache[0])}


FAULTS: dict[str, Fault] = {
    "append_key of another dtype": replace("append_key", with_dtype(torch.float64)),
    "append_key strided": replace("append_key", strided),
    "append_key two-dimensional": replace("append_key", lambda t: t.flatten(1)),
    "append_key missing": put("append_key", None),
    "append_value of another dtype": replace("append_value", with_dtype(torch.float64)),
    "append_value longer": replace("append_value", longer),
    "append_value with one row more": replace("append_value", one_row_more),
    "append_value missing": put("append_value", None),
    "paged_kv_cache longer": _cache_fault(longer),
    "paged_kv_cache strided": _cache_fault(strided),
    "paged_kv_cache of another dtype": _cache_fault(with_dtype(torch.float64)),
    "paged_kv_cache flat": _cache_fault(lambda t: t.flatten(-2)),
    "paged_kv_cache expanded": _cache_fault(expanded),
    "paged_kv_cache twice the same": _same_cache_twice,
    "paged_kv_cache missing": put("paged_kv_cache", None),
    "paged_kv_cache of three": lambda a: (
        {**a, "paged_kv_cache": (a["append_key"],) * 3} if "paged_kv_cache" in a else None
    ),
    "kv_layout unknown": put("kv_layout", "DHN"),
    "kv_layout missing": put("kv_layout", None),
    "append_ckv of another dtype": replace("append_ckv", with_dtype(torch.float64)),
    "append_ckv longer": replace("append_ckv", longer),
    "append_ckv missing": put("append_ckv", None),
    "append_kpe with one row more": replace("append_kpe", one_row_more),
    "append_kpe strided": replace("append_kpe", strided),
    "append_kpe missing": put("append_kpe", None),
    "ckv_cache longer": replace("ckv_cache", longer),
    "ckv_cache missing": put("ckv_cache", None),
    "kpe_cache with one page more": replace("kpe_cache", one_row_more),
    "kpe_cache of another dtype": replace("kpe_cache", with_dtype(torch.float64)),
    "kpe_cache missing": put("kpe_cache", None),
    "kv_indptr empty": replace("kv_indptr", lambda t: t[:0]),
    "append_indptr empty": replace("append_indptr", lambda t: t[:0]),
    "seq_lens longer": replace("seq_lens", longer),
    "kv_last_page_len longer": replace("kv_last_page_len", longer),
    "nnz negative": put("nnz", -1),
    "nnz floating": put("nnz", 4.0),
    "nnz missing": put("nnz", None),
    "page_size zero": put("page_size", 0),
    "page_size negative": put("page_size", -16),
    "page_size floating": put("page_size", 16.0),
}
for _name in (
    "batch_indices",
    "positions",
    "kv_indices",
    "kv_indptr",
    "kv_last_page_len",
    "append_indptr",
    "seq_lens",
):
    FAULTS |= _index_faults(_name)
for _name in ("batch_indices", "positions"):
    # Given to get_batch_indices_positions they may be absent.
    del FAULTS[f"{_name} missing"]
    FAULTS[f"{_name} longer"] = replace(_name, longer)


def usual(function: str, device: torch.device, cache: str = "pair") -> dict[str, Any]:
    """An ordinary call of `function`."""
    table = ((7, 0, 12), (2, 3, 1), 1, 1, 4)
    options = ("NHD", cache, (Layout(), Layout()), True, False, 3)
    return build(Case(function, torch.bfloat16, *table, 2, (64, 16), *options), device)


FAMILY = Family("page", page, FUNCTIONS, cases(), build, usual, FAULTS)


def test_appends_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)


FUSED = dataclasses.replace(
    FAMILY, functions=APPENDS[:1], usual=functools.partial(usual, cache="fused")
)
FUSED_FAULTS = [
    fault
    for fault, change in FAULTS.items()
    if change(FUSED.usual(APPENDS[0], torch.device("cpu"))) is not None
]


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_fault_is_refused_with_a_fused_cache(fault, device):
    check_fault(FUSED, fault, device)
