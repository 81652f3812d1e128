"""Rotary embeddings on their way to a paged cache: random dtypes, strides, norms and pages."""

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
    longer,
    one_row_more,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PAGE_SIZE = 4


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    dtype: torch.dtype
    cos_dtype: torch.dtype
    kept_dtype: torch.dtype | None  # of the paged cache; None: `dtype`
    tokens: int
    heads: tuple[int, int]
    dims: tuple[int, int]  # of queries and keys, of values
    norms: tuple[bool, bool]
    is_neox: bool
    kv_layout: str
    layouts: tuple[Layout, Layout]
    scales: tuple[float, float]
    enable_pdl: bool | None
    seed: int

    @property
    def has_norms(self) -> bool:
        """Whether heads may have norms: a power of two of vectors, in rows of vectors."""
        dim, v_dim = self.dims
        plain = self.layouts == (Layout(), Layout())
        return plain and dim in (32, 64, 128, 256) and v_dim > 0 and v_dim % 8 == 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        dtype=draw(st.sampled_from(FLOATING)),
        cos_dtype=draw(st.sampled_from((torch.float32, *FLOATING))),
        kept_dtype=draw(st.sampled_from((None, None, *FLOAT8))),
        tokens=draw(st.one_of(st.sampled_from([0, 1, 2, 65]), st.integers(1, 30))),
        heads=draw(st.tuples(st.sampled_from([0, 1, 4, 7, 32]), st.sampled_from([0, 1, 2, 3]))),
        dims=(
            draw(st.sampled_from([2, 6, 16, 32, 64, 80, 128, 256])),
            draw(st.sampled_from([0, 1, 8, 16, 24, 64, 128])),
        ),
        norms=draw(st.tuples(st.booleans(), st.booleans())),
        is_neox=draw(st.booleans()),
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        layouts=draw(st.sampled_from([None, None]) | st.tuples(LAYOUTS, LAYOUTS))
        or (Layout(), Layout()),
        scales=draw(st.tuples(*[st.sampled_from([1.0, 0.5, 1, 300.0, 1e-3])] * 2)),
        enable_pdl=draw(st.sampled_from([None, False, True])),
        seed=draw(st.integers(0, 2**31)),
    )


def _page_table(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """Two requests of random share; the last token is padding, one page entry leads nowhere."""
    generator = torch.Generator().manual_seed(case.seed)
    first = case.tokens // 2
    batch = torch.tensor([0] * first + [1] * (case.tokens - first), dtype=torch.int32)
    position = torch.cat([torch.arange(first), torch.arange(case.tokens - first) + 3]).int()
    if case.tokens > 2:
        batch[-1] = -1
    counts = [first // PAGE_SIZE + 1, (case.tokens + 3) // PAGE_SIZE + 1]
    indices = torch.randperm(sum(counts), generator=generator).int()
    if case.seed % 3 == 0:
        indices[case.seed % len(indices)] = 10**6
    table = {
        "batch_indices": batch,
        "positions": position,
        "kv_indices": indices,
        "kv_indptr": torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in table.items()}


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def draw(shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device).clamp(-3, 3)
        return empty_in_layout(shape, layout, dtype, device).copy_(values.to(dtype))

    dim, v_dim = case.dims
    heads = case.heads[1]
    angle = torch.randn(50, dim // 2, generator=generator, device=device)
    positions = torch.randint(0, 50, (case.tokens,), generator=generator, device=device)
    table = _page_table(case, device)
    pages = len(table["kv_indices"])
    inner = (pages, PAGE_SIZE, heads) if case.kv_layout == "NHD" else (pages, heads, PAGE_SIZE)
    layout = Layout(case.layouts[0].offset, case.layouts[0].gap)
    kept = case.kept_dtype or case.dtype
    norms = case.norms if case.has_norms else (False, False)
    weights = [draw((dim,), Layout(), case.dtype) if has else None for has in norms]
    return {
        "q": draw((case.tokens, case.heads[0], dim), case.layouts[0], case.dtype),
        "k": draw((case.tokens, heads, dim), case.layouts[1], case.dtype),
        "v": draw((case.tokens, heads, v_dim), case.layouts[0], case.dtype),
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], -1).to(case.cos_dtype),
        "pos_ids": positions if case.seed % 2 else positions.int(),
        "paged_kv_cache": tuple(draw((*inner, d), layout, kept) for d in (dim, v_dim)),
        **table,
        "q_weight": weights[0],
        "k_weight": weights[1],
        "eps": 1e-5,
        "is_neox": case.is_neox,
        "quant_scale_k": case.scales[0],
        "quant_scale_v": case.scales[1],
        "page_size": PAGE_SIZE,
        "kv_layout": case.kv_layout,
        "enable_pdl": case.enable_pdl,
    }


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    kept = case.kept_dtype or case.dtype
    # A norm makes numbers of up to the root of the size, its weights three times that.
    magnitude = 64.0 * max(1.0, *case.scales)
    return CheckOptions(bound=error_bound(kept, 8, magnitude=magnitude), check_bias=False)


def _second_cache(change: Any) -> Fault:
    def fault(arguments: dict[str, Any]) -> dict[str, Any] | None:
        first, second = arguments["paged_kv_cache"]
        return {**arguments, "paged_kv_cache": (first, change(second))}

    return fault


FAULTS: dict[str, Fault] = {
    "q double": replace("q", with_dtype(torch.float64)),
    "q strided": replace("q", strided),
    "q longer": replace("q", longer),
    "q two-dimensional": replace("q", lambda t: t[:, 0]),
    "q missing": put("q", None),
    "k of another dtype": replace("k", with_dtype(torch.float64)),
    "k with one row more": replace("k", one_row_more),
    "k longer": replace("k", longer),
    "paged_kv_cache narrower than v": replace("v", longer),
    "v of another dtype": replace("v", with_dtype(torch.float64)),
    "v missing": put("v", None),
    "cos_sin_cache longer": replace("cos_sin_cache", longer),
    "cos_sin_cache double": replace("cos_sin_cache", with_dtype(torch.float64)),
    "pos_ids longer": replace("pos_ids", longer),
    "pos_ids floating": replace("pos_ids", with_dtype(torch.float32)),
    "q_weight longer": replace("q_weight", longer),
    "q_weight of another dtype": replace("q_weight", with_dtype(torch.float64)),
    "k_weight longer": replace("k_weight", longer),
    "eps negative": put("eps", -1.0),
    "eps missing": put("eps", None),
    "is_neox number": put("is_neox", 0),
    "quant_scale_k zero": put("quant_scale_k", 0.0),
    "quant_scale_v not a number": put("quant_scale_v", float("nan")),
    "enable_pdl text": put("enable_pdl", "yes"),
    "paged_kv_cache longer": _second_cache(longer),
    "paged_kv_cache strided": _second_cache(strided),
    "paged_kv_cache of another dtype": _second_cache(with_dtype(torch.float64)),
    "paged_kv_cache missing": put("paged_kv_cache", None),
    "page_size other": put("page_size", 16),
    "page_size zero": put("page_size", 0),
    "kv_layout unknown": put("kv_layout", "DHN"),
    "kv_indices of floats": replace("kv_indices", lambda t: t.float()),
    "kv_indptr empty": replace("kv_indptr", lambda t: t[:0]),
    "batch_indices longer": replace("batch_indices", longer),
    "positions longer": replace("positions", longer),
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call."""
    types = torch.bfloat16, torch.float32, None
    shape = 5, (4, 2), (64, 48), (True, True)
    flags = True, "NHD", (Layout(), Layout()), (1.0, 1.0), None, 3
    return build(Case(*types, *shape, *flags), device)


def specs() -> list[JitSpec]:
    return [
        gen_rope_module(
            RopeConfig(dtype, kept, interleave, False, cos, append=True, keeps_rows=True)
        )
        for dtype in FLOATING
        for kept in (dtype, *FLOAT8)
        for cos in FLOATING
        for interleave in (False, True)
    ]


FAMILY = Family(
    "rope_append", rope, ("rope_append_paged_kv_cache",), cases(), build, usual, FAULTS,
    options=options, specs=specs,
)  # fmt: skip


def test_appending_ropes_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused(fault, device):
    check_fault(FAMILY, fault, device)


@pytest.mark.parametrize("columns", [48, 80, 1024])
def test_norm_of_other_sizes_is_refused_and_named(columns, device):
    if device.type == "cpu":
        pytest.skip("the reference takes any size")
    types = torch.bfloat16, torch.float32, None
    flags = (False, False), True, "NHD", (Layout(), Layout()), (1.0, 1.0), None, 3
    arguments = build(Case(*types, 5, (4, 2), (columns, 48), *flags), device)
    arguments["k_weight"] = torch.ones(columns, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="`k_weight` must be None or have"):
        rope.rope_append_paged_kv_cache(**arguments)
