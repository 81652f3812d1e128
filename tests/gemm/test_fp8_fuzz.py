"""Products of 8 bits under random shapes, strides and scales: right, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import gemm
from flashinfer.gemm._choice import GemmProblem, choose_config
from flashinfer.jit import JitSpec
from flashinfer.jit.gemm import gen_gemm_sm90_module
from flashinfer.jit.quantization import gen_group_quant_module
from flashinfer.quantization._kernels import rows_config
from flashinfer.testing import CheckOptions, ErrorBound, unit_roundoff
from flashinfer.testing.reference import template_of
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
    put,
    run_fuzz,
    strided,
    with_dtype,
)
from tests.fuzzing import replace as change

pytestmark = pytest.mark.usefixtures("hopper")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
BLOCKED = ("fp8_blockscale_gemm_sm90", "gemm_fp8_nt_groupwise", "gemm_fp8_nt_blockscaled")
FUNCTIONS = ("mm_fp8", "bmm_fp8", "fp8_linear", *BLOCKED)
OPERANDS = {
    "mm_fp8": ("a", "b"),
    "bmm_fp8": ("A", "B"),
    "fp8_linear": ("a", "weight"),
    "fp8_blockscale_gemm_sm90": ("input", "weight"),
    "gemm_fp8_nt_groupwise": ("a", "b"),
    "gemm_fp8_nt_blockscaled": ("a", "b"),
}
# Few sizes, because each may need a tile of its own; unusual types have two heights and no splits.
ROWS, FEW_ROWS, BATCHES = (0, 1, 3, 8, 17, 64, 70, 130, 300), (3, 130), (1, 3)
COLUMNS, TERMS, BLOCKED_TERMS, WIDE = (16, 144, 272), (16, 208, 2304), (128, 384, 2304), 4112
SUMS = 2.0**-12
"""What Hopper's sums of 8-bit products, with 14 bits, may lose of their terms' size."""


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    batches: int
    rows: int
    columns: int
    k: int
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]  # of both operands and the result
    backend: str
    layouts: tuple[str, str]  # of scales: "rows", "columns", "padded" or, in mode MN, "longer"
    mode: str
    by: tuple[bool, bool]  # whether 128 rows of each operand share scales
    gaps: tuple[int, int, int]
    has_bias: bool
    has_out: bool
    flag: bool
    seed: int


def _types(function: str) -> tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]:
    """Operands and results; the first one is the usual one, and comes with all sizes."""
    usual = (E4M3, E4M3, BF16)
    if function == "mm_fp8":
        return (usual, (E4M3, E4M3, HALF))
    if function == "bmm_fp8":
        return (usual, (E4M3, E4M3, HALF), (E4M3, E5M2, BF16), (E5M2, E4M3, HALF))
    if function == "fp8_linear":
        return (usual, (E5M2, E4M3, HALF), (E4M3, E5M2, FLOAT), (E4M3, E4M3, E4M3))
    if function == BLOCKED[0]:
        return (usual, (BF16, E4M3, BF16), (BF16, BF16, BF16))
    return (usual, (E4M3, E4M3, HALF), (E5M2, E5M2, BF16))


def _rows(columns: int, usual: bool) -> tuple[int, ...]:
    if columns == WIDE:
        return (8, 300)
    return ROWS if usual else FEW_ROWS


@st.composite
def cases(draw: st.DrawFn) -> Case:
    function = draw(st.sampled_from(FUNCTIONS))
    types = _types(function)
    dtypes = draw(st.sampled_from((types[0],) * len(types) + types))
    usual = dtypes == types[0] or function == BLOCKED[0]
    terms = BLOCKED_TERMS if function in BLOCKED else TERMS
    by = draw(st.booleans()), draw(st.booleans())
    columns = draw(st.sampled_from((*COLUMNS, WIDE) if usual else COLUMNS))
    gap = st.sampled_from([0, 0, 16, 48])  # elements between rows, which begin on 16 bytes
    layouts = st.sampled_from(["rows", "columns", "padded", "longer"])
    backends: dict[str, tuple[str, ...]]
    backends = {"mm_fp8": ("cublas", "cudnn", "auto"), "bmm_fp8": ("cublas", "cudnn", "auto")}
    backends["gemm_fp8_nt_groupwise"] = ("cutlass", "cutile")
    return Case(
        function,
        draw(st.sampled_from(BATCHES)) if function == "bmm_fp8" else 1,
        draw(st.sampled_from(_rows(columns, usual))),
        columns,
        draw(st.sampled_from(terms if usual else terms[:2])),
        dtypes,
        draw(st.sampled_from(backends.get(function, ("",)))),
        (draw(layouts), draw(layouts)),
        draw(st.sampled_from(["K", "MN"])),
        (function == BLOCKED[2] or by[0], function != BLOCKED[0] or by[1]),
        (draw(gap), draw(gap), draw(st.sampled_from([0, 0, 8]))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )


def _scale(rows: int, blocks: int, layout: str, random: torch.Generator) -> torch.Tensor:
    """Scales that differ by up to a factor of 8, so that one from another place shows."""
    layout = "rows" if rows == 0 else layout
    shape = (rows, blocks) if layout == "rows" else (blocks, rows)
    gap = 3 if layout == "padded" else 0
    scale = empty_in_layout(shape, Layout(gap=gap), FLOAT, random.device)
    scale.copy_(torch.exp2(3 * torch.rand(shape, generator=random, device=random.device) - 2))
    return scale if layout == "rows" else scale.t()


def _block_scales(case: Case, random: torch.Generator) -> dict[str, Any]:
    names, blocks = OPERANDS[case.function], case.k // 128
    found: dict[str, Any] = {}
    sizes = (case.rows, case.columns)
    may_be_longer = case.function != BLOCKED[0] and case.mode == "MN"  # than is read
    for i, (name, rows, by) in enumerate(zip(names, sizes, case.by, strict=True)):
        by = by and (i == 1 or case.function != BLOCKED[0])
        more = 3 if may_be_longer and case.layouts[i] == "longer" else 0
        scale = _scale((-(-rows // 128) if by else rows) + more, blocks, case.layouts[i], random)
        if case.dtypes[i] != BF16:
            found[f"{name}_scale"] = scale
    if case.function == BLOCKED[0]:
        return found | {"weight_ready": case.flag}
    if case.mode == "MN":
        found = {name: scale.t() for name, scale in found.items()}
    if case.function == BLOCKED[1]:
        granularity = (128 if case.by[0] else 1, 128, 128)
        found |= {"scale_granularity_mnk": granularity, "backend": case.backend}
    return found | {"scale_major_mode": case.mode, "mma_sm": 1 + case.flag}


def _other_scales(case: Case, random: torch.Generator) -> dict[str, Any]:
    def numbers(count: int) -> torch.Tensor:
        return torch.rand(count, generator=random, device=random.device) + 0.25

    if case.function == "mm_fp8":
        alpha = {"alpha": numbers(1)} if case.flag else {}
        return alpha | {"backend": case.backend}
    if case.function == "bmm_fp8":
        scales = numbers(3)  # the second one is not on 16 bytes
        return {"A_scale": scales[:1], "B_scale": scales[1], "backend": case.backend}
    found = {"a_scale": numbers(case.rows), "weight_scale": numbers(case.columns)}
    if case.has_bias:
        dtype = FLOAT if case.dtypes[2] == E4M3 else case.dtypes[2]
        found["bias"] = (10 * numbers(case.columns)).to(dtype)
    if case.dtypes[2] == E4M3:  # the largest results are beyond 448
        found["output_quant_scale"] = numbers(1) * 200 / case.k**0.5
    return found


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    random = torch.Generator(device).manual_seed(case.seed)
    batches = (case.batches,) if case.function == "bmm_fp8" else ()

    def matrix(rows: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
        shape, gap = (*batches, rows, case.k), 0 if case.function == BLOCKED[0] else gap
        values = torch.randn(shape, generator=random, device=device).to(dtype)
        return empty_in_layout(shape, Layout(2 * gap, gap), dtype, device).copy_(values)

    left, right = OPERANDS[case.function]
    a = matrix(case.rows, case.gaps[0], case.dtypes[0])
    b = matrix(case.columns, case.gaps[1], case.dtypes[1])
    call: dict[str, Any] = {left: a, right: b.mT if case.function in FUNCTIONS[:2] else b}
    call |= (_block_scales if case.function in BLOCKED else _other_scales)(case, random)
    if case.has_out:
        takes_strides = case.function in BLOCKED[1:]
        layout = Layout(gap=case.gaps[2] if takes_strides else 0)
        shape = (*batches, case.rows, case.columns)
        call["out"] = empty_in_layout(shape, layout, case.dtypes[2], device)
    if case.function not in BLOCKED or not case.has_out or case.flag:
        call["dtype" if case.function == "bmm_fp8" else "out_dtype"] = case.dtypes[2]
    return call


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """Sums lose what the size of their terms says: the product of the absolute values."""
    template = template_of(getattr(gemm, case.function), arguments)
    factor = arguments.get("output_quant_scale", 1.0)
    absolute = {
        name: value.float().abs().to(value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name not in ("out", "output_quant_scale")
    }
    (sums,) = template.compute(absolute)
    magnitude = sums.max().item() * float(factor) if sums.numel() else 0.0
    dtype = case.dtypes[2]
    info = torch.finfo(dtype)
    smallest = float(info.smallest_normal) * float(info.eps)
    if BF16 in case.dtypes[:2]:  # a code that is rounded the other way: an eighth of a term
        smallest += 2.0**-3 * 16.0
    return CheckOptions(bound=ErrorBound(2 * unit_roundoff(dtype), SUMS, smallest, magnitude))


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    backend = {"mm_fp8": "cublas", "bmm_fp8": "cublas"}.get(function, "cutlass")
    by = function == BLOCKED[2], True
    more = backend, ("rows", "rows"), "K", by, (0, 0, 0), True, True, True, 1
    k = 384 if function in BLOCKED else 208
    batches = 3 if function == "bmm_fp8" else 1
    return build(Case(function, batches, 9, 144, k, _types(function)[0], *more), device)


_OPERAND_FAULTS = {
    "longer": longer,
    "of single precision": with_dtype(FLOAT),
    "of half precision": with_dtype(HALF),
    "of integers": with_dtype(torch.int8),
    "flat": lambda t: t.flatten(),
    "with two dimensions more": lambda t: t[None, None],
}
_SCALE_FAULTS = {
    "longer": lambda t: t.reshape(-1).new_ones(t.numel() + 1) if t.ndim < 2 else longer(longer(t)),
    "of half precision": with_dtype(HALF),
    "double": with_dtype(torch.float64),
}


FAULTS: dict[str, Fault] = {
    f"{name} {what}": change(name, wrong)
    for names, kinds in {
        ("a", "b", "A", "B", "input", "weight"): _OPERAND_FAULTS,
        ("a_scale", "b_scale", "A_scale", "B_scale", "input_scale", "weight_scale"): _SCALE_FAULTS,
        ("alpha", "bias"): _SCALE_FAULTS,
    }.items()
    for name in names
    for what, wrong in kinds.items()
}


def _longer_scale(name: str) -> Fault:
    """More blocks along k; in mode MN there may be more rows than are read."""
    fault = FAULTS[f"{name} longer"]
    return lambda call: None if call.get("scale_major_mode") == "MN" else fault(call)


FAULTS |= {f"{name} longer": _longer_scale(name) for name in ("a_scale", "b_scale")}
_SCALES = [f"{name}_scale" for name in ("a", "b", "A", "B", "input", "weight")]
FAULTS |= {
    f"{name} missing": put(name, None) for name in ("a", "b", "A", "B", "input", "weight", *_SCALES)
}
FAULTS |= {
    f"{name} a number": put(name, 1.0)
    for name in ("a", "b", "A", "B", "input", "weight", *_SCALES, "alpha", "bias", "out")
}
FAULTS |= {
    "A of other batches": change("A", one_row_more),
    "out longer": change("out", longer),
    "out with one row more": change("out", one_row_more),
    "out double": change("out", with_dtype(torch.float64)),
    "out of integers": change("out", with_dtype(torch.int32)),
    "out strided": change("out", strided),
    "out expanded": change("out", expanded),
    "out_dtype double": put("out_dtype", torch.float64),
    "out_dtype a text": put("out_dtype", "bfloat16"),
    "dtype of single precision": put("dtype", FLOAT),
    "dtype missing": put("dtype", None),
    "backend unknown": put("backend", "trtllm"),
    "scale_major_mode unknown": put("scale_major_mode", "N"),
    "scale_major_mode missing": put("scale_major_mode", None),
    "scale_granularity_mnk unknown": put("scale_granularity_mnk", (1, 64, 128)),
    "mma_sm of 3": put("mma_sm", 3),
    "weight_ready a text": put("weight_ready", "yes"),
}
FUNCTION_FAULTS: dict[str, dict[str, Fault]] = {
    "fp8_linear": {
        "qkv_scale given": lambda call: {**call, "qkv_scale": call["a_scale"]},
        "config given": lambda call: {**call, "config": 1},
        "output_quant_scale without codes": lambda call: {
            **call,
            "output_quant_scale": call["a_scale"][:1],
        },
    },
}


def _problems() -> Iterator[GemmProblem]:
    """The products that this library computes."""
    for function in FUNCTIONS:
        types = _types(function)
        terms = BLOCKED_TERMS if function in BLOCKED else TERMS
        scales = {"fp8_linear": ("token_channel",), BLOCKED[0]: ("block", "group")}
        for scale in scales.get(function, ("block" if function in BLOCKED else "none",)):
            for a, b, out in types:
                usual = (a, b, out) == types[0] or function == BLOCKED[0]
                a, b = (E4M3 if dtype == BF16 else dtype for dtype in (a, b))
                problem = GemmProblem(a, b, FLOAT if out == E4M3 else out, 1, 1, 1, 1, scale)
                for columns in (*COLUMNS, WIDE) if usual else COLUMNS:
                    for rows in filter(None, _rows(columns, usual)):
                        for k in terms if usual else terms[:2]:
                            for batches in BATCHES if function == "bmm_fp8" else (1,):
                                shape = replace(problem, rows=rows, columns=columns, k=k)
                                yield replace(shape, batches=batches)


def specs() -> list[JitSpec]:
    """The modules of the drawn calls."""
    return [
        *(gen_gemm_sm90_module(config) for config in {choose_config(p) for p in _problems()}),
        gen_group_quant_module(rows_config(BF16, "column_major")),
    ]


FAMILY = Family(
    "8-bit products",
    gemm,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    function_faults=FUNCTION_FAULTS,
    options=options,
    specs=specs,
    full_examples=CALLS_OF_A_FUNCTION * len(FUNCTIONS),
)


def test_products_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
