"""Rotary embeddings under random dtypes, shapes, strides, alignments, positions and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import rope
from flashinfer.jit import JitSpec
from flashinfer.jit.rope import RopeConfig, gen_rope_module
from flashinfer.testing import CheckOptions, error_bound
from tests.fuzzing import (
    FLOATING,
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

LLAMA31 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
COMPUTED = tuple(
    f"apply_{llama}rope{pos_ids}{inplace}"
    for llama in ("", "llama31_")
    for pos_ids in ("", "_pos_ids")
    for inplace in ("", "_inplace")
)
CACHED = ("apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace")
FUNCTIONS = COMPUTED + CACHED
# Inputs of magnitude 1 or so: an element is a sum of two products, of magnitude below this.
MAGNITUDE = 8.0


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    cache_dtype: torch.dtype
    tokens: int
    heads: tuple[int, int]
    head_dim: int
    rotary_dim: int | None
    interleave: bool
    layouts: tuple[Layout, Layout]
    one_tensor: bool  # q and k are columns of one projection
    flat: bool  # query and key without a dimension of heads
    wide_positions: bool
    far: bool
    factors: tuple[float, float]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_dim = draw(st.sampled_from([2, 6, 16, 32, 48, 64, 64, 80, 96, 128, 128, 192, 256, 512]))
    parts = [None, head_dim, max(2, head_dim // 4 * 2), 2]
    return Case(
        function=draw(st.sampled_from(FUNCTIONS)),
        dtype=draw(st.sampled_from(FLOATING)),
        cache_dtype=draw(st.sampled_from((torch.float32, *FLOATING))),
        tokens=draw(st.one_of(st.sampled_from([0, 1, 2, 131]), st.integers(1, 40))),
        heads=draw(
            st.tuples(st.sampled_from([0, 1, 2, 4, 7, 16]), st.sampled_from([0, 1, 1, 2, 3]))
        ),
        head_dim=head_dim,
        rotary_dim=draw(st.sampled_from(parts)),
        interleave=draw(st.booleans()),
        layouts=draw(st.tuples(LAYOUTS, LAYOUTS)),
        one_tensor=draw(st.sampled_from([False, False, True])),
        flat=draw(st.booleans()),
        wide_positions=draw(st.booleans()),
        far=draw(st.booleans()),
        factors=draw(
            st.tuples(st.sampled_from([1, 1.0, 8.0, 0.3]), st.sampled_from([1e4, 5e5, 10]))
        ),
        seed=draw(st.integers(0, 2**31)),
    )


def _heads(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, [tokens, heads, head_dim]."""
    if case.one_tensor:
        both = (case.tokens, sum(case.heads) + 1, case.head_dim)
        layout = Layout(case.layouts[0].offset, case.layouts[0].gap)
        projection = empty_in_layout(both, layout, case.dtype, device)
        return projection[:, : case.heads[0]], projection[:, case.heads[0] : sum(case.heads)]
    q, k = (
        empty_in_layout((case.tokens, heads, case.head_dim), layout, case.dtype, device)
        for heads, layout in zip(case.heads, case.layouts, strict=True)
    )
    return q, k


def _requests(case: Case, device: torch.device) -> dict[str, Any]:
    """Requests of random lengths, empty ones and tokens of none included."""
    generator = torch.Generator().manual_seed(case.seed)
    count = case.seed % 5
    bounds = torch.randint(0, case.tokens + 1, (count + 1,), generator=generator).sort().values
    top = 200_000 if case.far else 100
    offsets = torch.randint(0, top, (count,), generator=generator)
    return {"indptr": bounds.int().to(device), "offsets": offsets.int().to(device)}


def _positions(case: Case, top: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    dtype = torch.int64 if case.wide_positions else torch.int32
    return torch.randint(0, top, (case.tokens,), generator=generator).to(device, dtype)


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)
    q, k = _heads(case, device)
    for x in (q, k):
        x.copy_(torch.randn(x.shape, generator=generator, device=device).clamp(-3, 3))
    if case.function in CACHED:
        if case.flat:
            shapes = [(case.tokens, n * case.head_dim) for n in case.heads]
            flat = (
                empty_in_layout(shape, Layout(layout.offset, layout.gap), case.dtype, device)
                for shape, layout in zip(shapes, case.layouts, strict=True)
            )
            q, k = (
                new.copy_(old.reshape(new.shape)) for new, old in zip(flat, (q, k), strict=True)
            )
        angle = torch.randn(
            50, (case.rotary_dim or case.head_dim) // 2, generator=generator, device=device
        )
        cache = torch.cat([angle.cos(), angle.sin()], -1).to(case.cache_dtype)
        return {
            "positions": _positions(case, 50, device),
            "query": q,
            "key": k,
            "head_size": case.head_dim,
            "cos_sin_cache": cache,
            "is_neox": not case.interleave,
        }
    arguments: dict[str, Any] = {"q": q, "k": k, "rotary_dim": case.rotary_dim}
    arguments["rope_scale"], arguments["rope_theta"] = case.factors
    arguments["interleave"] = case.interleave
    if "pos_ids" in case.function:
        arguments["pos_ids"] = _positions(case, 1_000_000 if case.far else 100, device)
    else:
        arguments |= _requests(case, device)
    return arguments | (LLAMA31 if "llama31" in case.function else {})


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    return CheckOptions(bound=error_bound(case.dtype, 8, magnitude=MAGNITUDE))


FAULTS: dict[str, Fault] = {
    "q strided": replace("q", strided),
    "q integer": replace("q", with_dtype(torch.int32)),
    "q double": replace("q", with_dtype(torch.float64)),
    "q of no dimension": replace("q", lambda t: t.flatten()[0] if t.numel() else None),
    "q two-dimensional": replace("q", lambda t: t[:, 0] if t.shape[1] else None),
    "q missing": put("q", None),
    "k strided": replace("k", strided),
    "k longer": replace("k", longer),
    "k with one row more": replace("k", one_row_more),
    "k of another dtype": replace("k", with_dtype(torch.float64)),
    "k missing": put("k", None),
    "pos_ids longer": replace("pos_ids", longer),
    "pos_ids floating": replace("pos_ids", with_dtype(torch.float32)),
    "pos_ids strided": replace("pos_ids", strided),
    "pos_ids missing": put("pos_ids", None),
    "indptr two-dimensional": replace("indptr", lambda t: t[None]),
    "indptr of floats": replace("indptr", lambda t: t.float()),
    "indptr empty": replace("indptr", lambda t: t[:0]),
    "indptr missing": put("indptr", None),
    "offsets longer": replace("offsets", longer),
    "offsets of floats": replace("offsets", lambda t: t.float()),
    "offsets missing": put("offsets", None),
    "rotary_dim odd": put("rotary_dim", 1),
    "rotary_dim zero": put("rotary_dim", 0),
    "rotary_dim negative": put("rotary_dim", -2),
    "rotary_dim beyond the head": put("rotary_dim", 514),
    "interleave number": put("interleave", 1),
    "interleave text": put("interleave", "yes"),
    "rope_scale zero": put("rope_scale", 0.0),
    "rope_scale not a number": put("rope_scale", float("nan")),
    "rope_scale text": put("rope_scale", "1"),
    "rope_theta negative": put("rope_theta", -1e4),
    "rope_theta infinite": put("rope_theta", float("inf")),
    "low_freq_factor zero": put("low_freq_factor", 0.0),
    "low_freq_factor above": put("low_freq_factor", 5.0),
    "high_freq_factor below": put("high_freq_factor", 0.5),
    "high_freq_factor missing": put("high_freq_factor", None),
    "old_context_len zero": put("old_context_len", 0),
    "query strided": replace("query", strided),
    "query double": replace("query", with_dtype(torch.float64)),
    "query one-dimensional": replace("query", lambda t: t.reshape(-1)),
    "query longer": replace("query", longer),
    "query missing": put("query", None),
    "key strided": replace("key", strided),
    "key longer": replace("key", longer),
    "key with one row more": replace("key", one_row_more),
    "key of another dtype": replace("key", with_dtype(torch.float64)),
    "positions longer": replace("positions", longer),
    "positions floating": replace("positions", with_dtype(torch.float32)),
    "positions missing": put("positions", None),
    "head_size zero": put("head_size", 0),
    "head_size negative": put("head_size", -128),
    "head_size floating": put("head_size", 64.0),
    "cos_sin_cache integer": replace("cos_sin_cache", with_dtype(torch.int32)),
    "cos_sin_cache double": replace("cos_sin_cache", with_dtype(torch.float64)),
    "cos_sin_cache odd": replace("cos_sin_cache", longer),
    "cos_sin_cache strided": replace("cos_sin_cache", strided),
    "cos_sin_cache one-dimensional": replace("cos_sin_cache", lambda t: t[0]),
    "cos_sin_cache missing": put("cos_sin_cache", None),
    "is_neox number": put("is_neox", 1),
}


def _shared(first: str, second: str) -> Fault:
    """In place, one tensor must not be both."""

    def fault(arguments: dict[str, Any]) -> dict[str, Any] | None:
        if first not in arguments or arguments[first].numel() == 0:
            return None
        return {**arguments, second: arguments[first]}

    return fault


IN_PLACE_FAULTS: dict[str, Fault] = {
    "k is q": _shared("q", "k"),
    "q expanded": replace("q", expanded),
    "key is query": _shared("query", "key"),
    "query expanded": replace("query", expanded),
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    shape = (5, (4, 2), 64, 64)
    flags = (False, (Layout(), Layout()), False, True, False, False, (1.0, 1e4), 3)
    return build(Case(function, torch.bfloat16, torch.float32, *shape, *flags), device)


def specs() -> list[JitSpec]:
    kinds = [(True, torch.float32), *((False, dtype) for dtype in FLOATING)]
    return [
        gen_rope_module(RopeConfig(dtype, dtype, interleave, computed, cache_dtype))
        for dtype in FLOATING
        for interleave in (False, True)
        for computed, cache_dtype in kinds
    ]


FAMILY = Family(
    "rope",
    rope,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    function_faults={f: IN_PLACE_FAULTS for f in FUNCTIONS if f.endswith("_inplace")},
    options=options,
    specs=specs,
)


def test_ropes_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
