"""Weights of 4 and 8 bits and the routers' products under random sizes, layouts and scales."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import gemm
from flashinfer.gemm import router
from flashinfer.gemm._weight_kernels import choose_weight_config, is_aligned
from flashinfer.jit import JitSpec
from flashinfer.jit.weight_gemm import WeightGemmConfig, gen_weight_gemm_module
from flashinfer.testing import CheckOptions, error_bound
from flashinfer.trace.templates.weight_only import _codes_of, _scales_of
from tests.fuzzing import (
    CALLS_OF_A_FUNCTION,
    Family,
    Fault,
    Layout,
    check_fault,
    empty_in_layout,
    expanded,
    longer,
    one_row_more,
    over,
    put,
    replace,
    run_fuzz,
    shifted,
    sliding,
    strided,
    with_dtype,
)

pytestmark = pytest.mark.usefixtures("hopper")

BF16, HALF, FLOAT, BYTES = torch.bfloat16, torch.float16, torch.float32, torch.uint8
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ROUTERS = tuple(name for name in dir(router) if name.startswith("mm_M1_16_"))
FUNCTIONS = ("weight_only_linear", *ROUTERS)
TOKENS = (1, 2, 7, 8, 9, 16)  # of a router
FEW, MANY = (0, 1, 3, 8, 13), (0, 1, 3, 8, 13, 17, 64, 70, 130, 300)


@dataclass(frozen=True)
class Weights:
    """A format, and the sizes it is drawn with: each may need kernels of its own."""

    name: str
    group: int  # elements of k to a scale; 0: a row has one
    dtype: torch.dtype
    scale: torch.dtype
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    terms: tuple[int, ...]


# Sums of 8192 terms are split. From 128 columns on, Hopper's copy engine brings those weights of
# bfloat16 whose k is a multiple of 256 and whose scales are aligned; rows choose among its tiles.
WEIGHTS = (
    Weights("int4", 128, BF16, BF16, (*FEW, 64, 130, 300), (136, 2056), (1024, 8192)),
    Weights("mxfp4", 32, BF16, BYTES, MANY, (1000,), (32, 1536)),
    Weights("nvfp4", 16, BF16, E4M3, (*FEW, 70), (1000,), (96, 768)),
    Weights("int4", 0, BF16, FLOAT, (*FEW, 130), (8, 264), (32, 256)),
    Weights("int4", 32, HALF, HALF, (0, 3, 17), (72,), (352, 8192)),
    Weights("int4", 64, HALF, FLOAT, (0, 3, 70), (72, 136), (64, 448)),
    Weights("int8", 0, BF16, BF16, (*FEW, 17, 64, 70), (8, 264), (16, 272)),
    Weights("int8", 64, HALF, HALF, (0, 3, 70), (72,), (192, 4096)),
    Weights("int8", 128, BF16, FLOAT, (0, 8, 17), (136,), (384,)),
    Weights("mxfp4", 32, HALF, BYTES, (0, 3, 70), (72, 136), (96, 256)),
    Weights("nvfp4", 16, HALF, E4M3, (0, 3, 17), (72,), (32, 1056)),
)
SAME_BYTES = {BYTES: E8M0, E4M3: BYTES}  # what else scales may be called


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    weights: Weights
    rows: int
    columns: int
    k: int
    gaps: tuple[int, int]  # units of 16 bytes between rows of the operands
    scale_gap: int  # -1: up to the next 16 elements
    scale_is_named_otherwise: bool
    scale_is_column: bool
    has_bias: bool
    has_alpha: bool
    has_out: bool
    enable_pdl: bool | None
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # The first function has most of what can be drawn.
    function = draw(st.sampled_from((FUNCTIONS[0], *FUNCTIONS)))
    weights = draw(st.sampled_from(WEIGHTS))
    is_router = function in ROUTERS
    return Case(
        function=function,
        weights=weights,
        rows=draw(st.sampled_from(TOKENS if is_router else weights.rows)),
        columns=draw(st.sampled_from(weights.columns)),
        k=draw(st.sampled_from(weights.terms)),
        gaps=(draw(st.sampled_from((0, 0, 1, 5))), draw(st.sampled_from((0, 0, 1, 3)))),
        scale_gap=draw(st.sampled_from((0, 0, -1, 1))),
        scale_is_named_otherwise=draw(st.booleans()),
        scale_is_column=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        has_alpha=draw(st.booleans()),
        has_out=draw(st.booleans()),
        enable_pdl=draw(st.sampled_from((None, False, True))),
        seed=draw(st.integers(0, 2**31)),
    )


def _matrix(values: torch.Tensor, gap: int) -> torch.Tensor:
    """`values` with poison between and around the rows."""
    matrix = empty_in_layout(tuple(values.shape), Layout(gap=gap), values.dtype, values.device)
    return matrix.copy_(values)


def _wide(values: torch.Tensor, gap: int) -> torch.Tensor:
    return _matrix(values, gap * 16 // values.itemsize)


def _scale_room(columns: int, gap: int) -> int:
    """Elements between rows of scales."""
    return -columns % 16 if gap < 0 else gap


def _scale(case: Case, random: torch.Generator) -> torch.Tensor:
    form, n = case.weights, case.columns
    columns = case.k // form.group if form.group else 1
    shape = (n, columns)
    if form.name == "mxfp4":
        values = torch.randint(120, 131, shape, generator=random, device=random.device).byte()
    else:
        values = torch.rand(shape, generator=random, device=random.device) + 0.1
        # Two in three are positive; all signs and many sizes have scales of 8 bits.
        values = (values * (values - 0.4).sign()).to(form.scale)
    scale = _matrix(values, _scale_room(columns, case.scale_gap))
    if case.scale_is_named_otherwise and form.scale in SAME_BYTES:
        scale = scale.view(SAME_BYTES[form.scale])
    return scale if form.group or case.scale_is_column else scale[:, 0]


def _weight_only(case: Case, random: torch.Generator) -> dict[str, Any]:
    form, m, n, k, device = case.weights, case.rows, case.columns, case.k, random.device
    shape = (n, k) if form.name == "int8" else (n, k // 2)
    codes = torch.randint(0, 256, shape, generator=random, device=device).to(BYTES)
    if form.name == "int8":
        codes = codes.view(torch.int8)
    x = torch.randn(m, k, generator=random, device=device).to(form.dtype)
    arguments: dict[str, Any] = {
        "input": _wide(x, case.gaps[0]),
        "weight": _wide(codes, case.gaps[1]),
        "weight_scale": _scale(case, random),
        "weight_format": form.name,
        "enable_pdl": case.enable_pdl,
    }
    if case.has_bias:
        arguments["bias"] = torch.randn(n, generator=random, device=device).to(form.dtype)
    if case.has_alpha:
        arguments["alpha"] = torch.rand(1, generator=random, device=device) + 0.5
    if case.has_out:
        arguments["out"] = empty_in_layout((m, n), Layout(), form.dtype, device)
    return arguments


def _sizes(function: str) -> tuple[int, int]:
    """k and n of a router."""
    k, n = function.removesuffix("_bf16").split("_")[3:]
    return int(k[1:]), int(n[1:])


def _out_dtype(function: str) -> torch.dtype:
    return BF16 if function.endswith(("_bf16", "_N128")) else FLOAT


def _routed(case: Case, random: torch.Generator) -> dict[str, Any]:
    (k, n), device = _sizes(case.function), random.device
    a = torch.randn(case.rows, k, generator=random, device=device).to(BF16)
    weight = torch.randn(n, k, generator=random, device=device).to(BF16)
    out = Layout(offset=case.seed % 3, gap=case.scale_gap % 4)  # its rows need no alignment
    return {
        "mat_a": _wide(a, case.gaps[0]),
        "mat_b": _wide(weight, case.gaps[1]).T,
        "out": empty_in_layout((case.rows, n), out, _out_dtype(case.function), device),
        "launch_with_pdl": case.enable_pdl is not False,
    }


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    random = torch.Generator(device).manual_seed(case.seed)
    return (_routed if case.function in ROUTERS else _weight_only)(case, random)


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    case = Case(
        function, WEIGHTS[0], 8, 136, 1024, (0, 0), 0, False, False, True, True, True, True, 1
    )
    return build(case, device)


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions | None:
    """Sums lose what the size of their terms says, not that of their results."""
    if not case.rows:
        return None
    if case.function in ROUTERS:
        left, right = arguments["mat_a"], arguments["mat_b"].double()
        dtype, added = arguments["out"].dtype, 0.0
    else:
        left, name = arguments["input"], case.weights.name
        scales = _scales_of(arguments["weight_scale"], name, left.shape[1])
        right = (_codes_of(arguments["weight"], name) * scales).T
        dtype, added = left.dtype, arguments.get("bias", torch.zeros(1)).abs().max().item()
    size = (left.double().abs() @ right.abs()).max().item() * float(arguments.get("alpha", 1.0))
    # Each product of two tiles cuts bits of its sums off.
    bound = error_bound(dtype, left.shape[1], operations=64, magnitude=size + added)
    return CheckOptions(bound=bound)


def _with_rows(fault: Fault) -> Fault:
    """A fault that the kernel's binding finds: it is not called without rows."""
    return lambda call: fault(call) if len(call.get("input", [0])) else None


FAULTS: dict[str, Fault] = {
    "input longer": replace("input", longer),
    "input of another dtype": replace("input", with_dtype(FLOAT)),
    "input flat": replace("input", torch.Tensor.flatten),
    "input strided": _with_rows(replace("input", strided)),
    "input missing": put("input", None),
    "weight longer": replace("weight", longer),
    "weight of another dtype": replace("weight", with_dtype(torch.int32)),
    "weight flat": replace("weight", torch.Tensor.flatten),
    "weight strided": _with_rows(replace("weight", strided)),
    "weight a number": put("weight", 1.0),
    "weight_scale longer": replace("weight_scale", lambda t: t.new_zeros(len(t), 5)),
    "weight_scale with one row more": replace("weight_scale", one_row_more),
    "weight_scale of another dtype": replace("weight_scale", with_dtype(torch.float64)),
    "weight_scale missing": put("weight_scale", None),
    "weight_format unknown": put("weight_format", "int3"),
    "weight_format missing": put("weight_format", None),
    "weight_format a list": put("weight_format", ["int4"]),
    "alpha longer": replace("alpha", longer),
    "alpha of another dtype": replace("alpha", with_dtype(torch.float64)),
    "alpha a number": put("alpha", 0.5),
    "bias longer": replace("bias", longer),
    "bias of another dtype": replace("bias", with_dtype(torch.float64)),
    "bias strided": _with_rows(replace("bias", strided)),
    "bias a number": put("bias", 1.0),
    "enable_pdl text": put("enable_pdl", "yes"),
    "enable_pdl a number": put("enable_pdl", 1),
    "mat_a longer": replace("mat_a", longer),
    "mat_a of another dtype": replace("mat_a", with_dtype(HALF)),
    "mat_a of no row": replace("mat_a", lambda t: t[:0]),
    "mat_a with 17 rows": replace("mat_a", lambda t: t.new_zeros(17, t.shape[1])),
    "mat_a flat": replace("mat_a", torch.Tensor.flatten),
    "mat_a strided": replace("mat_a", strided),
    "mat_a missing": put("mat_a", None),
    "mat_b longer": replace("mat_b", longer),
    "mat_b of another dtype": replace("mat_b", with_dtype(HALF)),
    "mat_b by rows": replace("mat_b", torch.Tensor.contiguous),
    "mat_b transposed": replace("mat_b", torch.Tensor.t),
    "mat_b a number": put("mat_b", 1),
    "launch_with_pdl text": put("launch_with_pdl", "yes"),
    "launch_with_pdl missing": put("launch_with_pdl", None),
    **{
        f"out over {name}": over(name)
        for name in ("input", "weight", "weight_scale", "alpha", "bias", "mat_a", "mat_b")
    },
    "out longer": replace("out", longer),
    "out with one row more": replace("out", one_row_more),
    "out of another dtype": replace("out", with_dtype(torch.float64)),
    "out a number": put("out", 1.0),
    "out strided": replace("out", strided),
    "out expanded": replace("out", expanded),
    "out sliding": replace("out", sliding),
}
# The reference backend has neither vectors nor an order in which it reads and writes.
KERNEL_FAULTS: dict[str, Fault] = {
    "input off its vectors": _with_rows(replace("input", shifted)),
    "weight off its vectors": _with_rows(replace("weight", shifted)),
    "mat_a off its vectors": replace("mat_a", shifted),
}


def _chosen(weights: Weights) -> set[WeightGemmConfig]:
    """What all calls with weights of a format need."""
    device, found = torch.device("cuda", torch.cuda.current_device()), set()
    sizes = product(weights.rows, weights.columns, weights.terms)
    for (m, n, k), gap in product(sizes, (0, -1, 1)):
        columns = k // weights.group if weights.group else 1
        room = columns + _scale_room(columns, gap)
        scale = torch.empty(n, room, dtype=weights.scale)[:, :columns]
        aligned = is_aligned(scale if weights.group else scale[:, 0])
        form = weights.dtype, weights.dtype, weights.name, weights.scale, weights.group
        if m:
            found.add(choose_weight_config(device, *form, m, n, k, aligned=aligned))
    return found


def specs() -> list[JitSpec]:
    """The modules of the drawn calls, on a Hopper GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    configs = set().union(*map(_chosen, WEIGHTS))
    for name, m in product(ROUTERS, TOKENS):
        k, n = _sizes(name)
        form = BF16, _out_dtype(name), "plain", BF16, 0
        configs.add(choose_weight_config(device, *form, m, n, k))
    return [gen_weight_gemm_module(config) for config in configs]


FAMILY = Family(
    "products of weights that are read once",
    gemm,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    kernel_faults=KERNEL_FAULTS,
    options=options,
    specs=specs,
    full_examples=CALLS_OF_A_FUNCTION * (len(FUNCTIONS) + 1),
)


def test_products_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
