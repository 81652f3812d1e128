"""Quantising rotary embeddings under random dtypes, shapes, strides, outputs and page tables."""

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
APPEND = "rope_quantize_fp8_append_paged_kv_cache"
FUNCTIONS = ("rope_quantize_fp8", "mla_rope_quantize_fp8", APPEND)
PAGE_SIZE = 4


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    cache_dtype: torch.dtype
    out_dtype: torch.dtype
    tokens: int
    heads: tuple[int, int]
    dims: tuple[int, int, int, int]  # rope, rest of q, rest of k, v
    one_head: bool  # K without a dimension of heads
    absent: bool  # no `nope` parts
    is_neox: bool
    kv_layout: str
    layouts: tuple[Layout, Layout]
    outs: bool
    scales: tuple[float, float]
    enable_pdl: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = st.sampled_from([0, 1, 8, 16, 24, 64, 128, 192, 512])
    return Case(
        function=draw(st.sampled_from(FUNCTIONS)),
        dtype=draw(st.sampled_from(FLOATING)),
        cache_dtype=draw(st.sampled_from((torch.float32, *FLOATING))),
        out_dtype=draw(st.sampled_from(FLOAT8)),
        tokens=draw(st.one_of(st.sampled_from([0, 1, 2, 65]), st.integers(1, 30))),
        heads=draw(st.tuples(st.sampled_from([0, 1, 4, 7, 32]), st.sampled_from([0, 1, 2, 3]))),
        dims=(
            draw(st.sampled_from([2, 6, 16, 32, 64, 64, 128, 256])),
            *(draw(dims),) * 2,
            draw(dims),
        ),
        one_head=draw(st.booleans()),
        absent=draw(st.sampled_from([False, False, True])),
        is_neox=draw(st.booleans()),
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        layouts=draw(st.tuples(LAYOUTS, LAYOUTS)),
        outs=draw(st.booleans()),
        scales=draw(st.tuples(*[st.sampled_from([1.0, 0.5, 1, 300.0, 1e-3])] * 2)),
        enable_pdl=draw(st.booleans()),
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

    rope_dim, q_rest, k_rest, v_dim = case.dims
    appends, mla = case.function == APPEND, case.function.startswith("mla")
    one_head = mla or case.one_head
    q, k = (case.tokens, case.heads[0]), (case.tokens, case.heads[1])
    k = k[:1] if one_head else k
    absent = case.absent and not mla
    arguments: dict[str, Any] = {
        "q_rope": draw((*q, rope_dim), case.layouts[0], case.dtype),
        "k_rope": draw((*k, rope_dim), case.layouts[1], case.dtype),
        "q_nope": None if absent else draw((*q, q_rest), case.layouts[1], case.dtype),
        "k_nope": None if absent else draw((*k, k_rest), case.layouts[0], case.dtype),
    }
    angle = torch.randn(50, rope_dim // 2, generator=generator, device=device)
    arguments["cos_sin_cache"] = torch.cat([angle.cos(), angle.sin()], -1).to(case.cache_dtype)
    positions = torch.randint(0, 50, (case.tokens,), generator=generator, device=device)
    arguments["pos_ids"] = positions if case.seed % 2 else positions.int()
    arguments |= {"is_neox": case.is_neox, "enable_pdl": case.enable_pdl}
    arguments |= {"quant_scale_q": case.scales[0], "quant_scale_kv": case.scales[1]}
    outs = ("q_rope", "q_nope") if appends else ("q_rope", "k_rope", "q_nope", "k_nope")
    if case.outs:
        for name in outs:
            if arguments[name] is not None:
                shape = tuple(arguments[name].shape)
                out = empty_in_layout(shape, case.layouts[1], case.out_dtype, device)
                arguments[f"{name}_out"] = out
    if not case.outs or case.seed % 2:
        arguments["quantize_dtype"] = case.out_dtype
    if not appends:
        return arguments
    table = _page_table(case, device)
    pages = (len(table["kv_indices"]), PAGE_SIZE)
    k_rest = 0 if absent else k_rest
    if one_head:
        dims, inner = (k_rest, rope_dim), pages
    else:
        heads = case.heads[1]
        dims = rope_dim + k_rest, v_dim
        inner = (*pages, heads) if case.kv_layout == "NHD" else (pages[0], heads, PAGE_SIZE)
    layout = Layout(case.layouts[0].offset, case.layouts[0].gap)
    return {
        **arguments,
        **table,
        "v": None if one_head else draw((*k, v_dim), case.layouts[0], case.dtype),
        "paged_kv_cache": tuple(draw((*inner, d), layout, case.out_dtype) for d in dims),
        "page_size": PAGE_SIZE,
        "kv_layout": case.kv_layout,
    }


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    magnitude = 8.0 * max(case.scales)
    return CheckOptions(bound=error_bound(case.out_dtype, 8, magnitude=magnitude), check_bias=False)


def _second_cache(change: Any) -> Fault:
    def fault(arguments: dict[str, Any]) -> dict[str, Any] | None:
        if "paged_kv_cache" not in arguments:
            return None
        first, second = arguments["paged_kv_cache"]
        changed = change(second)
        return None if changed is None else {**arguments, "paged_kv_cache": (first, changed)}

    return fault


FAULTS: dict[str, Fault] = {
    "q_rope double": replace("q_rope", with_dtype(torch.float64)),
    "q_rope strided": replace("q_rope", strided),
    "q_rope longer": replace("q_rope", longer),
    "q_rope two-dimensional": replace("q_rope", lambda t: t[:, 0] if t.shape[1] else None),
    "q_rope missing": put("q_rope", None),
    "k_rope of another dtype": replace("k_rope", with_dtype(torch.float64)),
    "k_rope with one row more": replace("k_rope", one_row_more),
    "k_rope longer": replace("k_rope", longer),
    "k_rope missing": put("k_rope", None),
    "q_nope of another dtype": replace("q_nope", with_dtype(torch.float64)),
    "q_nope with one row more": replace("q_nope", one_row_more),
    "k_nope strided": replace("k_nope", strided),
    "k_nope with a dimension more": replace("k_nope", lambda t: t[:, None]),
    "cos_sin_cache longer": replace("cos_sin_cache", longer),
    "cos_sin_cache double": replace("cos_sin_cache", with_dtype(torch.float64)),
    "cos_sin_cache missing": put("cos_sin_cache", None),
    "pos_ids longer": replace("pos_ids", longer),
    "pos_ids floating": replace("pos_ids", with_dtype(torch.float32)),
    "pos_ids missing": put("pos_ids", None),
    "is_neox number": put("is_neox", 0),
    "quant_scale_q zero": put("quant_scale_q", 0.0),
    "quant_scale_q not a number": put("quant_scale_q", float("nan")),
    "quant_scale_q below float32": put("quant_scale_q", 1e-50),
    "quant_scale_kv negative": put("quant_scale_kv", -1.0),
    "quant_scale_kv missing": put("quant_scale_kv", None),
    "quantize_dtype not an 8-bit float": put("quantize_dtype", torch.float16),
    "quantize_dtype text": put("quantize_dtype", "float8_e4m3fn"),
    "enable_pdl text": put("enable_pdl", "yes"),
    "q_rope_out longer": replace("q_rope_out", longer),
    "q_rope_out strided": replace("q_rope_out", strided),
    "q_rope_out with one row more": replace("q_rope_out", one_row_more),
    "k_rope_out longer": replace("k_rope_out", longer),
    "q_nope_out longer": replace("q_nope_out", longer),
    "k_nope_out strided": replace("k_nope_out", strided),
    "paged_kv_cache narrower than v": replace("v", lambda t: longer(t)),
    "v of another dtype": replace("v", with_dtype(torch.float64)),
    "paged_kv_cache longer": _second_cache(longer),
    "paged_kv_cache strided": _second_cache(strided),
    "paged_kv_cache of another dtype": _second_cache(with_dtype(torch.float16)),
    "paged_kv_cache missing": put("paged_kv_cache", None),
    "page_size other": put("page_size", 16),
    "page_size zero": put("page_size", 0),
    "kv_layout unknown": put("kv_layout", "DHN"),
    "kv_indices of floats": replace("kv_indices", lambda t: t.float()),
    "kv_indptr empty": replace("kv_indptr", lambda t: t[:0]),
    "batch_indices longer": replace("batch_indices", longer),
    "positions longer": replace("positions", longer),
    "positions missing": put("positions", None),
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    types = torch.bfloat16, torch.float32, FLOAT8[0]
    shape = 5, (4, 2), (32, 64, 64, 48), False, False
    flags = True, "NHD", (Layout(), Layout()), True, (1.0, 1.0), False, 3
    return build(Case(function, *types, *shape, *flags), device)


def specs() -> list[JitSpec]:
    return [
        gen_rope_module(RopeConfig(dtype, out, interleave, False, cache, append))
        for dtype in FLOATING
        for out in FLOAT8
        for cache in FLOATING
        for interleave in (False, True)
        for append in (False, True)
    ]


FAMILY = Family(
    "rope_quantize", rope, FUNCTIONS, cases(), build, usual, FAULTS, options=options, specs=specs
)


def test_quantizing_ropes_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
