"""Products under random shapes, strides, groups, scales and formats of weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import gemm
from flashinfer.gemm._choice import GemmProblem, choose_config
from flashinfer.gemm._weight_kernels import choose_weight_config
from flashinfer.jit import JitSpec
from flashinfer.jit.gemm import gen_gemm_sm90_module
from flashinfer.jit.weight_gemm import gen_weight_gemm_module
from flashinfer.testing import CheckOptions, error_bound
from tests.fuzzing import (
    Family,
    Fault,
    Layout,
    check_fault,
    empty_in_layout,
    expanded,
    longer,
    put,
    run_fuzz,
    strided,
    with_dtype,
)
from tests.fuzzing import replace as change

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
FUNCTIONS = ("weight_only_linear", "gemm_fp8_nt_groupwise", "group_gemm_fp8_nt_groupwise")
# Few sizes of k and n, because each may need a tile of its own; rows are free.
ROWS, COLUMNS, TERMS = (0, 1, 3, 8, 17, 64, 70, 130), (8, 72, 264), (256, 1152)
FORMATS = (("int4", 128), ("int4", 0), ("int8", 0), ("mxfp4", 32), ("nvfp4", 16))
SUMS_OF_8_BITS = 4096  # roundings of float32 that make the 12 bits left of Hopper's sums


@pytest.fixture(autouse=True)
def _on_hopper(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU: most of the kernels are built for it")


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    rows: int
    columns: int
    k: int
    weights: tuple[str, int]
    mode: str  # of scales
    lengths: tuple[int, ...]  # of groups; their rows begin after a gap
    gap: int
    has_bias: bool
    has_alpha: bool
    out: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = st.lists(st.sampled_from([0, 0, 1, 5, 128, 131]), max_size=4)
    return Case(
        function=draw(st.sampled_from(FUNCTIONS)),
        rows=draw(st.sampled_from(ROWS)),
        columns=draw(st.sampled_from(COLUMNS)),
        k=draw(st.sampled_from(TERMS)),
        weights=draw(st.sampled_from(FORMATS)),
        mode=draw(st.sampled_from(["K", "MN"])),
        lengths=(*draw(lengths), draw(st.integers(1, 40))),
        gap=draw(st.sampled_from([0, 0, 16, 48])),
        has_bias=draw(st.booleans()),
        has_alpha=draw(st.booleans()),
        out=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def _matrix(values: torch.Tensor, gap: int) -> torch.Tensor:
    """`values` with NaN around the rows; 16 bytes stay a divisor of every address."""
    matrix = empty_in_layout(tuple(values.shape), Layout(gap=gap), values.dtype, values.device)
    return matrix.copy_(values)


def _weight_only(case: Case, device: torch.device, random: torch.Generator) -> dict[str, Any]:
    name, group = case.weights
    m, n, k = case.rows, case.columns, case.k
    x = torch.randn(m, k, generator=random, device=device).to(BF16)
    shape = (n, k) if name == "int8" else (n, k // 2)
    codes = torch.randint(0, 256, shape, generator=random, device=device)
    scales = torch.rand((n, k // group) if group else (n,), generator=random, device=device) + 0.1
    if name == "mxfp4":
        scales = (scales * 8 + 120).to(torch.uint8)
    else:
        scales = scales.to(E4M3 if name == "nvfp4" else BF16)
    codes = (codes - 128).to(torch.int8) if name == "int8" else codes.to(torch.uint8)
    arguments: dict[str, Any] = {
        "input": _matrix(x, case.gap),
        "weight": codes,
        "weight_scale": scales,
        "weight_format": name,
    }
    if case.has_bias:
        arguments["bias"] = torch.randn(n, generator=random, device=device).to(BF16)
    if case.has_alpha:
        arguments["alpha"] = torch.rand(1, generator=random, device=device) + 0.5
    return arguments


def _codes(shape: tuple[int, ...], gap: int, random: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=random, device=random.device).to(E4M3)
    if gap == 0 or len(shape) == 3:
        return values
    wide = torch.randn(shape[0], shape[1] + gap, generator=random, device=random.device).to(E4M3)
    wide[:, : shape[1]] = values
    return wide[:, : shape[1]]


def _scales(shape: tuple[int, ...], mode: str, random: torch.Generator) -> torch.Tensor:
    scale = torch.rand(shape, generator=random, device=random.device) + 0.25
    if mode == "K":
        return scale
    return scale.transpose(-1, -2).clone(memory_format=torch.contiguous_format)


def _groupwise(case: Case, device: torch.device, random: torch.Generator) -> dict[str, Any]:
    grouped = case.function == "group_gemm_fp8_nt_groupwise"
    groups = (len(case.lengths),) if grouped else ()
    m, n, k = sum(case.lengths) if grouped else max(case.rows, 1), case.columns, case.k
    arguments: dict[str, Any] = {
        "a": _codes((m, k), case.gap, random),
        "b": _codes((*groups, n, k), case.gap, random),
        "a_scale": _scales((m, k // 128), case.mode, random),
        "b_scale": _scales((*groups, -(-n // 128), k // 128), case.mode, random),
        "scale_major_mode": case.mode,
    }
    if grouped:
        bounds = torch.tensor([0, *case.lengths]).cumsum(0)
        arguments["m_indptr"] = bounds.to(device, torch.int32)
    return arguments


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    random = torch.Generator(device).manual_seed(case.seed)
    is_weight_only = case.function == "weight_only_linear"
    arguments = (_weight_only if is_weight_only else _groupwise)(case, device, random)
    left = arguments["input" if is_weight_only else "a"]
    if case.out:
        arguments["out"] = torch.full(
            (left.shape[0], case.columns), float("nan"), dtype=BF16, device=device
        )
    return arguments


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    case = Case(function, 8, 72, 256, FORMATS[0], "K", (5, 3), 0, True, True, True, 1)
    return build(case, device)


def _options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """Sums lose what the size of their terms says, not that of their results."""
    if case.function == "weight_only_linear":
        largest = {"int4": 8.0, "int8": 128.0}.get(case.weights[0], 6.0)
        scale = 2.0 ** (128 - 127) if case.weights[0] == "mxfp4" else 1.1
        magnitude = 4.0 * largest * scale * case.k**0.5 * 1.5
        return CheckOptions(bound=error_bound(BF16, case.k, magnitude=magnitude))
    return CheckOptions(
        bound=error_bound(BF16, operations=SUMS_OF_8_BITS, magnitude=4.0 * case.k**0.5)
    )


FAULTS: dict[str, Fault] = {
    "out longer": change("out", longer),
    "out of another dtype": change("out", with_dtype(torch.float64)),
    "a longer": change("a", longer),
    "a of another dtype": change("a", with_dtype(torch.float32)),
    "b longer": change("b", longer),
    "a_scale longer": change("a_scale", lambda t: t.new_zeros(t.shape[0], t.shape[1] + 5)),
    "a_scale of another dtype": change("a_scale", with_dtype(BF16)),
    "b_scale longer": change("b_scale", longer),
    "scale_major_mode unknown": put("scale_major_mode", "N"),
    "m_indptr of floats": change("m_indptr", with_dtype(torch.float32)),
    "weight of another dtype": change("weight", with_dtype(torch.int32)),
    "weight longer": change("weight", longer),
    "weight_scale longer": change("weight_scale", longer),
    "weight_scale of another dtype": change("weight_scale", with_dtype(torch.float64)),
    "weight_format unknown": put("weight_format", "int3"),
    "alpha longer": change("alpha", longer),
    "bias longer": change("bias", longer),
    "bias of another dtype": change("bias", with_dtype(torch.float64)),
}
KERNEL_FAULTS: dict[str, Fault] = {
    "out strided": change("out", strided),
    "out expanded": change("out", expanded),
    "m_indptr longer": change("m_indptr", longer),
}


def _problems() -> Iterator[GemmProblem]:
    for n in COLUMNS:
        for k in TERMS:
            for m in ROWS[1:]:
                yield GemmProblem(E4M3, E4M3, BF16, m, n, k, scale="block")
            for groups in (1, 2, 3, 4, 5):
                for m in (1, 60, 140, 300, 655):
                    problem = GemmProblem(E4M3, E4M3, BF16, m, n, k, groups, "block", "offsets")
                    yield replace(problem, rows=min(m, 131 * groups))


def specs() -> list[JitSpec]:
    """The modules of the drawn calls, on a Hopper GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    configs = {choose_config(problem) for problem in _problems()}
    weights = set()
    for name, group in FORMATS:
        scale = {"mxfp4": torch.uint8, "nvfp4": E4M3}.get(name, BF16)
        for m in ROWS[1:]:
            for n in COLUMNS:
                for k in TERMS:
                    problem = (device, BF16, BF16, name, scale, group, m, n, k)
                    weights.add(choose_weight_config(*problem))
    return [
        *(gen_gemm_sm90_module(config) for config in configs),
        *(gen_weight_gemm_module(config) for config in weights),
    ]


FAMILY = Family(
    "gemm",
    gemm,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    kernel_faults=KERNEL_FAULTS,
    options=_options,
    specs=specs,
)


def test_products_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
