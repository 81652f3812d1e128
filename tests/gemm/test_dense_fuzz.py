"""Products of 16 bits under random shapes, strides and options: right, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import gemm
from flashinfer.gemm._choice import GemmProblem, choose_config
from flashinfer.jit import JitSpec
from flashinfer.jit.few_rows import FewRowsConfig, gen_few_rows_module
from flashinfer.jit.gemm import gen_gemm_sm90_module
from flashinfer.jit.one_row import COLUMNS, OneRowConfig, gen_one_row_module
from flashinfer.testing import CheckOptions, ErrorBound, error_bound
from tests.fuzzing import (
    CALLS_OF_A_FUNCTION,
    FLOATING,
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
    run_fuzz,
    sliding,
    strided,
    with_dtype,
)
from tests.fuzzing import replace as change

pytestmark = pytest.mark.usefixtures("hopper")

BF16 = torch.bfloat16
FUNCTIONS = ("mm_bf16", "bmm_bf16", "tinygemm_bf16")
OPERANDS = {"mm_bf16": "ab", "bmm_bf16": "AB", "tinygemm_bf16": ("input", "weight")}
BACKENDS = ("auto", "cudnn", "tinygemm", "cublaslt")
# Few sizes, because each may need a tile of its own; results of other types have two heights.
ROWS, OTHER_ROWS = (0, 1, 3, 8, 17, 64, 70, 130, 300), (3, 130)
TERMS, BATCHES = (8, 136, 520, 4608), (1, 3)
ANY_COLUMNS, FEW_COLUMNS, WIDE = (1, 8, 13, 72, 264), (64, 128, 320), 4100
GAPS = st.sampled_from([0, 0, 8, 64])  # elements between rows, which begin on 16 bytes


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    batches: int
    rows: int
    columns: int
    k: int
    out_dtype: torch.dtype
    backend: str
    by_rows: bool  # the weight's rows are contiguous, not its columns
    gaps: tuple[int, int, int]
    permuted: bool
    has_bias: bool
    has_out: bool
    early: tuple[bool, bool]
    seed: int

    @property
    def own(self) -> bool:
        """Whether the product is this library's on Hopper."""
        return self.backend != "cublaslt" and (
            self.rows <= 64 or self.backend == "tinygemm" or self.out_dtype != BF16
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    function = draw(st.sampled_from(FUNCTIONS))
    out_dtype = draw(st.sampled_from((BF16, *FLOATING))) if "tiny" not in function else BF16
    by_rows = function == "mm_bf16" and out_dtype == BF16 and draw(st.booleans())
    rows: tuple[int, ...] = ROWS if out_dtype == BF16 else OTHER_ROWS
    columns: tuple[int, ...] = ANY_COLUMNS
    k: tuple[int, ...] = TERMS
    if by_rows:
        rows, columns, k = (1, 2, 3, 8), FEW_COLUMNS, (16, 528, 4608)
    elif out_dtype == BF16:
        columns = (*ANY_COLUMNS, WIDE)
    return Case(
        function,
        draw(st.sampled_from(BATCHES)) if function == "bmm_bf16" else 1,
        draw(st.sampled_from(rows)),
        draw(st.sampled_from(columns)),
        draw(st.sampled_from(k)),
        out_dtype,
        "tinygemm"
        if function == "tinygemm_bf16"
        else draw(st.sampled_from(BACKENDS if out_dtype == BF16 and not by_rows else BACKENDS[:3])),
        by_rows,
        (draw(GAPS), draw(GAPS), draw(st.sampled_from([0, 0, 8] if by_rows else [0, 3, 8]))),
        draw(st.booleans()),
        function != "bmm_bf16" and draw(st.booleans()),
        function == "tinygemm_bf16" or draw(st.booleans()),
        (draw(st.booleans()), draw(st.booleans())),
        draw(st.integers(0, 2**31)),
    )


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    random = torch.Generator(device).manual_seed(case.seed)
    batches = (case.batches,) if case.function == "bmm_bf16" else ()

    def empty(rows: int, columns: int, gap: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        layout = Layout(offset=gap and 8, gap=gap, permuted=bool(batches) and case.permuted)
        return empty_in_layout((*batches, rows, columns), layout, dtype, device)

    def matrix(rows: int, columns: int, gap: int) -> torch.Tensor:
        out = empty(rows, columns, gap)
        return out.copy_(torch.randn(out.shape, generator=random, device=device))

    left, right = OPERANDS[case.function]
    weight = (case.k, case.columns) if case.by_rows else (case.columns, case.k)
    b = matrix(*weight, case.gaps[1])
    if not case.by_rows and case.function != "tinygemm_bf16":
        b = b.mT
    call: dict[str, Any] = {left: matrix(case.rows, case.k, case.gaps[0]), right: b}
    if case.has_out:
        call["out"] = empty(case.rows, case.columns, case.gaps[2], case.out_dtype)
    if case.has_bias:
        bias = torch.randn(case.columns, generator=random, device=device)
        call["bias"] = bias.to(case.out_dtype)
    if case.function == "tinygemm_bf16":
        return call | {"use_pdl": case.early[0]}
    call |= {"out_dtype": case.out_dtype, "backend": case.backend}
    if case.function == "mm_bf16":
        call |= {"pdl": case.early[0], "weight_ready": case.early[1]}
    return call


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """Sums lose what the size of their terms says, not that of their results.

    cuBLAS may divide k and round the sums of the parts.
    """
    left, right = (arguments[name].double().abs() for name in OPERANDS[case.function])
    sums = left @ (right.mT if case.function == "tinygemm_bf16" else right)
    magnitude = sums.max().item() if sums.numel() else 0.0
    if case.has_bias:
        magnitude += arguments["bias"].abs().max().item()
    bound = error_bound(case.out_dtype, case.k, operations=16 + case.k // 8, magnitude=magnitude)
    if not case.own:
        bound = ErrorBound(2 * bound.rounding, 2.0**-11, 2 * bound.smallest, magnitude)
    return CheckOptions(bound=bound)


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`, of more rows than take weights with contiguous rows."""
    has_bias, batches = function != "bmm_bf16", 3 if function == "bmm_bf16" else 1
    more = False, (0, 0, 0), False, has_bias, True, (False, False), 1
    case = Case(function, batches, 9, 72, 136, BF16, "tinygemm", *more)
    return build(case, device)


def _in_cublas(fault: Fault) -> Fault:
    by_library = put("backend", "cublaslt")
    return lambda call: by_library(fault(call) or {})


FAULTS: dict[str, Fault] = {
    f"{name} {what}": change(name, wrong)
    for name in ("a", "b", "A", "B", "input", "weight")
    for what, wrong in {
        "longer": longer,
        "of half precision": with_dtype(torch.float16),
        "of single precision": with_dtype(torch.float32),
        "of integers": with_dtype(torch.int32),
        "flat": lambda t: t.flatten(),
        "with a dimension more": lambda t: t[None],
        "missing": lambda t: None,
        "a list": lambda t: t.tolist(),
    }.items()
    # One more column of b is another product, whose `out` is wrong.
    if (name, what) not in {("b", "longer"), ("B", "longer")}
}
FAULTS |= {f"{name} missing": put(name, None) for names in OPERANDS.values() for name in names}
FAULTS |= {
    "a strided": change("a", strided),
    "A strided": change("A", strided),
    "input strided": change("input", strided),
    "weight strided": change("weight", strided),
    "b of other k": change("b", one_row_more),
    "B of other k": change("B", lambda t: longer(t.mT).mT),
    "A of other batches": change("A", one_row_more),
    "B of other batches": change("B", one_row_more),
    "out longer": change("out", longer),
    "out with one row more": change("out", one_row_more),
    "out flat": change("out", lambda t: t.flatten()),
    "out strided": change("out", strided),
    "out expanded": change("out", expanded),
    "out sliding": change("out", sliding),
    "out of half precision": change("out", with_dtype(torch.float16)),
    "out double": change("out", with_dtype(torch.float64)),
    "out a number": put("out", 1.0),
    **{f"out over {name}": over(name) for name in ("a", "b", "A", "B", "input", "weight", "bias")},
    **{
        f"out over {name} in cuBLASLt": _in_cublas(over(name))
        for name in ("a", "b", "A", "B", "bias")
    },
    "bias longer": change("bias", longer),
    "bias of one": change("bias", lambda t: t[:1] if len(t) > 1 else None),
    "bias a matrix": change("bias", lambda t: t[None]),
    "bias double": change("bias", with_dtype(torch.float64)),
    "bias of half precision": change("bias", with_dtype(torch.float16)),
    "bias a number": put("bias", 1.0),
    "pdl a number": put("pdl", 1),
    "weight_ready a text": put("weight_ready", "yes"),
    "use_pdl a number": put("use_pdl", 1),
    "out_dtype double": put("out_dtype", torch.float64),
    "out_dtype of 8 bits": put("out_dtype", torch.float8_e4m3fn),
    "out_dtype a text": put("out_dtype", "bfloat16"),
    "backend unknown": put("backend", "cutlass"),
    "backend missing": put("backend", None),
    "backend a number": put("backend", 1),
}
KERNEL_FAULTS: dict[str, Fault] = {
    "b strided": change("b", strided),
    "B strided": change("B", strided),
    "out_dtype missing": put("out_dtype", None),
}
FUNCTION_FAULTS = {"tinygemm_bf16": {"out missing": put("out", None)}}


def _problems() -> Iterator[GemmProblem]:
    """The products that this library computes."""
    for k in TERMS:
        for columns in (*ANY_COLUMNS, WIDE):
            for batches in BATCHES:
                for rows in ROWS[1:]:
                    yield GemmProblem(BF16, BF16, BF16, rows, columns, k, batches)
                if columns == WIDE:
                    continue
                for dtype in FLOATING:
                    for rows in OTHER_ROWS:
                        yield GemmProblem(BF16, BF16, dtype, rows, columns, k, batches)


def specs() -> list[JitSpec]:
    """The modules of the drawn calls."""
    return [
        *(gen_gemm_sm90_module(config) for config in {choose_config(p) for p in _problems()}),
        *(gen_one_row_module(OneRowConfig(BF16, columns, False)) for columns in COLUMNS),
        *(gen_few_rows_module(FewRowsConfig(BF16, columns)) for columns in (64, 128)),
    ]


FAMILY = Family(
    "dense products",
    gemm,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    function_faults=FUNCTION_FAULTS,
    kernel_faults=KERNEL_FAULTS,
    options=options,
    specs=specs,
    full_examples=CALLS_OF_A_FUNCTION * len(FUNCTIONS),
)


def test_products_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
