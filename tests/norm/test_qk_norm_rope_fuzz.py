"""Norm and rotation of video tokens under random sizes, dtypes, strides, alignments and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import flashinfer
from flashinfer.jit import JitSpec
from flashinfer.jit.qk_norm_rope import QkNormRopeConfig, gen_qk_norm_rope_module
from flashinfer.testing import CheckOptions, error_bound
from tests.fuzzing import (
    FLOATING,
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

# Elements of a normalised row of a few thousand, times a weight below this; rotation adds two.
MAGNITUDE = 40.0
NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    dtype: torch.dtype
    patches: tuple[int, int, int]
    videos: int
    batched: bool
    pairs: tuple[int, int, int]
    heads: tuple[int, int, int]
    layout: Layout
    outs: tuple[bool, bool, bool]
    interleave: bool
    norm: bool
    fp8: bool
    yarn: bool
    scales: tuple[float, float]
    numbers: tuple[float, float]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pairs = draw(
        st.one_of(
            st.sampled_from([(22, 21, 21), (8, 12, 12), (32, 16, 16), (8, 0, 0), (0, 8, 8)]),
            st.tuples(*[st.integers(0, 20)] * 3),
        )
    )
    return Case(
        dtype=draw(st.sampled_from(FLOATING)),
        patches=draw(st.tuples(*[st.integers(1, 4)] * 3)),
        videos=draw(st.sampled_from([0, 1, 1, 2, 3, 30])),
        batched=draw(st.booleans()),
        pairs=pairs if sum(pairs) else (1, 0, 0),
        heads=draw(st.tuples(*[st.sampled_from([1, 1, 2, 3, 8, 24])] * 3)),
        layout=draw(
            st.builds(Layout, offset=st.sampled_from([0, 0, 1]), gap=st.sampled_from([0, 0, 8, 3]))
        ),
        outs=draw(st.tuples(*[st.booleans()] * 3)),
        interleave=draw(st.booleans()),
        norm=draw(st.sampled_from([True, True, False])),
        fp8=draw(st.booleans()),
        yarn=draw(st.booleans()),
        scales=draw(st.tuples(*[st.sampled_from([1.0, 0.25, 64.0])] * 2)),
        numbers=draw(st.tuples(st.sampled_from([1e-6, 0.1]), st.sampled_from([1e4, 256.0]))),
        seed=draw(st.integers(0, 2**31)),
    )


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)
    head_dim = 2 * sum(case.pairs)
    tokens = case.videos * case.patches[0] * case.patches[1] * case.patches[2]
    columns = sum(case.heads) * head_dim
    qkv = empty_in_layout((tokens, columns), case.layout, case.dtype, device)
    qkv.copy_(torch.randn(qkv.shape, generator=generator, device=device).clamp(-3, 3))
    arguments: dict[str, Any] = {"qkv": qkv}
    for name, heads in zip(NAMES[:2], case.heads, strict=False):
        weight = torch.rand(heads * head_dim, generator=generator, device=device) + 0.5
        arguments[f"{name}_weight"] = weight.to(case.dtype)
    leading = (case.videos, tokens // case.videos) if case.batched and case.videos else (tokens,)
    arguments["qkv"] = qkv.unflatten(0, leading) if len(leading) == 2 else qkv
    out_dtype = torch.float8_e4m3fn if case.fp8 else case.dtype
    for name, heads, given_out in zip(NAMES, case.heads, case.outs, strict=True):
        if given_out:
            shape = (*leading, heads, head_dim)
            arguments[f"{name}_out"] = torch.empty(shape, dtype=out_dtype, device=device)
    arguments |= dict(zip(("ppf", "pph", "ppw"), case.patches, strict=True))
    axes = ("num_frame_channels", "num_height_channels", "num_width_channels")
    arguments |= {axis: 2 * pairs for axis, pairs in zip(axes, case.pairs, strict=True)}
    arguments |= {f"num_heads_{name}": n for name, n in zip(NAMES, case.heads, strict=True)}
    arguments |= {"head_dim": head_dim, "interleave": case.interleave, "is_qk_norm": case.norm}
    arguments["eps"], arguments["base"] = case.numbers
    arguments["output_fp8"] = case.fp8
    if case.fp8:
        arguments["output_quant_scale"], arguments["v_quant_scale"] = case.scales
    if case.yarn:
        arguments |= {"factor": 3.0, "low": 2.0, "high": 7.0, "attention_factor": 1.1}
    return arguments


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    columns = 2 * sum(case.pairs) * max(case.heads)
    scale = max(case.scales) if case.fp8 else 1.0
    dtype = torch.float8_e4m3fn if case.fp8 else case.dtype
    return CheckOptions(bound=error_bound(dtype, columns, magnitude=MAGNITUDE * scale))


def _set(name: str, value: Any) -> Fault:
    return lambda arguments: {**arguments, name: value}


FAULTS: dict[str, Fault] = {
    "qkv missing": put("qkv", None),
    "qkv strided": replace("qkv", strided),
    "qkv integer": replace("qkv", with_dtype(torch.int32)),
    "qkv double": replace("qkv", with_dtype(torch.float64)),
    "qkv wider": replace("qkv", longer),
    "qkv one-dimensional": replace("qkv", lambda t: t.reshape(-1)),
    "qkv four-dimensional": replace("qkv", lambda t: t[(None,) * (4 - t.ndim)]),
    "q_weight missing": put("q_weight", None),
    "q_weight longer": replace("q_weight", longer),
    "q_weight strided": replace("q_weight", strided),
    "q_weight of another dtype": replace("q_weight", with_dtype(torch.float64)),
    "k_weight two-dimensional": replace("k_weight", lambda t: t[None]),
    "k_weight longer": replace("k_weight", longer),
    "k_weight of another dtype": replace("k_weight", with_dtype(torch.float64)),
    "q_out longer": replace("q_out", longer),
    "q_out with one row more": replace("q_out", one_row_more),
    "q_out of another dtype": replace("q_out", with_dtype(torch.float64)),
    "k_out strided": replace("k_out", strided),
    "v_out of another dtype": replace("v_out", with_dtype(torch.float8_e5m2)),
    "v_out a list": _set("v_out", [1]),
    "ppf zero": _set("ppf", 0),
    "pph negative": _set("pph", -2),
    "ppw floating": _set("ppw", 4.0),
    "num_frame_channels odd": _set("num_frame_channels", 3),
    "num_height_channels negative": _set("num_height_channels", -2),
    "num_width_channels odd": _set("num_width_channels", 1),
    "num_heads_q zero": _set("num_heads_q", 0),
    "num_heads_k text": _set("num_heads_k", "2"),
    "num_heads_v negative": _set("num_heads_v", -1),
    "head_dim odd": _set("head_dim", 7),
    "head_dim beyond the kernel": _set("head_dim", 1026),
    "eps negative": _set("eps", -1e-6),
    "eps not a number": _set("eps", float("nan")),
    "base zero": _set("base", 0.0),
    "base text": _set("base", "1"),
    "factor negative": _set("factor", -1.0),
    "low above": _set("low", 100.0),
    "low negative": _set("low", -1.0),
    "high infinite": _set("high", float("inf")),
    "attention_factor zero": _set("attention_factor", 0.0),
    "interleave number": _set("interleave", 1),
    "is_qk_norm text": _set("is_qk_norm", "no"),
    "output_fp8 number": _set("output_fp8", 1),
    "output_quant_scale zero": _set("output_quant_scale", 0.0),
    "output_quant_scale text": _set("output_quant_scale", "1"),
    "output_quant_scale beyond float32": _set("output_quant_scale", 1e39),
    "v_quant_scale negative": _set("v_quant_scale", -1.0),
    "v_quant_scale not a number": _set("v_quant_scale", float("nan")),
}


def _unfinished_video(arguments: dict[str, Any]) -> dict[str, Any] | None:
    tokens = arguments["qkv"].flatten(0, -2).shape[0]
    return {**arguments, "ppf": tokens + 1} if tokens else None


def _shared(name: str, other: str) -> Fault:
    """Two results in one tensor, of the shape that both would have."""

    def fault(arguments: dict[str, Any]) -> dict[str, Any] | None:
        heads = arguments[f"num_heads_{name[0]}"] == arguments[f"num_heads_{other[0]}"]
        if other not in arguments or not heads or not arguments[other].numel():
            return None
        return {**arguments, name: arguments[other]}

    return fault


FAULTS |= {
    "qkv of half a video": _unfinished_video,
    "k_out is q_out": _shared("k_out", "q_out"),
    "v_out is k_out": _shared("v_out", "k_out"),
}


USUAL = Case(
    torch.bfloat16,
    (2, 3, 4),
    2,
    False,
    (8, 12, 12),
    (2, 2, 2),
    Layout(),
    (True, True, True),
    True,
    True,
    True,
    True,
    (1.0, 1.0),
    (1e-6, 1e4),
    3,
)


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call."""
    return build(USUAL, device)


def specs() -> list[JitSpec]:
    return [
        gen_qk_norm_rope_module(QkNormRopeConfig(dtype, out, interleave, norm))
        for dtype in FLOATING
        for out in (dtype, torch.float8_e4m3fn)
        for interleave in (False, True)
        for norm in (False, True)
    ]


FAMILY = Family(
    "qk_norm_rope",
    flashinfer,
    ("fused_qk_rmsnorm_rope",),
    cases(),
    build,
    usual,
    FAULTS,
    options=options,
    specs=specs,
)


def test_videos_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
