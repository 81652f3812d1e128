"""Products with what follows or precedes them, under random sizes, layouts and options."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import gemm
from flashinfer.gemm._choice import GemmProblem, choose_config
from flashinfer.jit import JitSpec
from flashinfer.jit.few_rows import FewRowsOutput, gen_few_rows_module
from flashinfer.jit.few_rows import _configs as few_rows_configs
from flashinfer.jit.gemm import gen_gemm_sm90_module
from flashinfer.jit.one_row import _configs as one_row_configs
from flashinfer.jit.one_row import gen_one_row_module
from flashinfer.testing import CheckOptions, error_bound
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
    replace,
    run_fuzz,
    shifted,
    sliding,
    strided,
    with_dtype,
)

pytestmark = pytest.mark.usefixtures("hopper")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GATED, NORM, ROW, CODES = FUNCTIONS = (
    "mm_silu_and_mul_bf16",
    "mm_add_rmsnorm_bf16",
    "add_rmsnorm_mm_bf16",
    "fp8_blockscale_gemm_swiglu_sm90",
)
ROWS = {
    GATED: tuple(range(1, 9)),
    NORM: tuple(range(1, 9)),
    ROW: (1,),
    CODES: (0, 1, 3, 8, 17, 64, 70, 130, 300),
}
# Columns of weights. Clusters divide the sums of long rows, and eight CTAs those of few columns.
COLUMNS = {
    GATED: (128, 384, 1280, 8320),
    NORM: (256, 768, 2304, 4096),
    ROW: (8, 72, 1000, 25352),
    CODES: (256, 768, 1280),
}
TERMS = {
    GATED: (16, 48, 272, 2064),
    NORM: (16, 48, 272, 2064, 4080),
    ROW: (8, 24, 264, 2048, 4096),
    CODES: (128, 384, 2048),
}
MOST_WEIGHTS = 1 << 24


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    rows: int
    columns: int
    k: int
    gaps: tuple[int, ...]  # units of 16 bytes between rows
    scales: tuple[str, str]  # order of their elements
    given: tuple[bool, bool, bool]  # which results have a destination
    has_bias: bool
    eps: float
    enable_pdl: bool | None
    weight_ready: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    function = draw(st.sampled_from(FUNCTIONS))
    columns = draw(st.sampled_from(COLUMNS[function]))
    terms = [k for k in TERMS[function] if k * columns <= MOST_WEIGHTS]
    orders = st.sampled_from(("rows", "columns", "apart"))
    return Case(
        function=function,
        rows=draw(st.sampled_from(ROWS[function])),
        columns=columns,
        k=draw(st.sampled_from(terms)),
        gaps=tuple(draw(st.sampled_from((0, 0, 1, 5))) for _ in range(4)),
        scales=(draw(orders), draw(orders)),
        given=(draw(st.booleans()), draw(st.booleans()), draw(st.booleans())),
        has_bias=draw(st.booleans()),
        eps=draw(st.sampled_from((0.0, 1e-6, 1e-3, 1.0))),
        enable_pdl=draw(st.sampled_from((None, False, True))),
        weight_ready=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


class Maker:
    """Tensors of a case, with NaN between and around their rows."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.random = torch.Generator(device).manual_seed(case.seed)

    def values(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.device)

    def empty(self, *shape: int, gap: int = 0) -> torch.Tensor:
        return empty_in_layout(shape, Layout(gap=8 * self.case.gaps[gap]), BF16, self.device)

    def rows(self, *shape: int, gap: int = 0, factor: float = 1.0) -> torch.Tensor:
        return self.empty(*shape, gap=gap).copy_(self.values(*shape) * factor)

    def vector(self, length: int) -> torch.Tensor:
        return self.values(length).to(BF16)

    def scales(self, rows: int, columns: int, order: str, factor: float = 1.0) -> torch.Tensor:
        if order == "columns":  # rows of the transpose, which are padded
            room = Layout(gap=-rows % 4 + 4 * self.case.gaps[2])
            scale = empty_in_layout((columns, rows), room, torch.float32, self.device).T
        elif order == "apart":
            wide = empty_in_layout((rows, 2 * columns), Layout(gap=1), torch.float32, self.device)
            scale = wide[:, ::2]
        else:
            scale = empty_in_layout((rows, columns), Layout(), torch.float32, self.device)
        spread = torch.rand(scale.shape, generator=self.random, device=self.device)
        return scale.copy_((0.1 + 2 * spread.square()) * factor)


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    make, m, n, k = Maker(case, device), case.rows, case.columns, case.k
    call: dict[str, Any] = {"weight_ready": case.weight_ready}
    if case.function == CODES:
        codes = {
            name: make.values(size, k).to(E4M3) for name, size in (("input", m), ("weight", n))
        }
        call |= codes
        call["input_scale"] = make.scales(m, k // 128, case.scales[0])
        call["weight_scale"] = make.scales(n // 128, k // 128, case.scales[1], k**-0.5)
        results = {
            "out": empty_in_layout((m, n // 2), Layout(), E4M3, device),
            "out_scale": empty_in_layout((m, n // 256), Layout(), torch.float32, device),
        }
    else:
        call["enable_pdl"] = case.enable_pdl
        call["b"] = make.rows(k, n, gap=1, factor=k**-0.5)
        call["input" if case.function == ROW else "a"] = make.rows(m, k)
        results = {"out": make.empty(m, n // 2 if case.function == GATED else n, gap=2)}
    if case.function == NORM:
        call |= {"residual": make.rows(m, n, gap=3), "norm_weight": make.vector(n)}
    if case.function == ROW:
        call |= {"residual": make.rows(1, k, gap=3), "norm_weight": make.vector(k)}
        results |= {name: make.empty(1, k) for name in ("residual_out", "normed_out")}
        if case.has_bias:
            call["bias"] = make.vector(n)
    if case.function in (NORM, ROW):
        call["eps"] = case.eps
    is_given = zip(results.items(), case.given, strict=False)
    return call | {name: tensor for (name, tensor), given in is_given if given}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    m = 1 if function == ROW else 4
    n, k = (512, 256) if function != ROW else (72, 264)
    orders, given = ("rows", "rows"), (True, True, True)
    case = Case(function, m, n, k, (0,) * 4, orders, given, True, 1e-6, None, False, 1)
    return build(case, device)


def _top(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


def options(case: Case, call: dict[str, Any]) -> CheckOptions | None:
    """Sums lose what the size of their terms says, not that of their results."""
    if case.function == CODES:
        return None  # the template compares codes and scales itself
    left, right = call["input" if case.function == ROW else "a"].double(), call["b"].double()
    smallest = 0.0
    if case.function == ROW:
        total = left + call["residual"].double()
        factor = (total.square().mean(-1, keepdim=True) + case.eps).rsqrt()
        left = total * factor * call["norm_weight"].double()
        # The norm is rounded before it is multiplied; where it is near the middle of two numbers,
        # either one is right.
        smallest = 2 * torch.finfo(BF16).eps * _top(left) * _top(right)
    plain, size = left @ right, left.abs() @ right.abs()
    if case.function == GATED:
        gate, up = plain.chunk(2, -1)
        of_gate, of_up = size.chunk(2, -1)
        # silu's slope is at most 1.1.
        magnitude = _top(1.1 * of_gate * up.abs() + gate.abs() * of_up + (gate * up).abs())
    elif case.function == NORM:
        total = plain + call["residual"].double()
        size = size + call["residual"].double().abs()
        factor = (total.square().mean(-1, keepdim=True) + case.eps).rsqrt()
        magnitude = max(_top(size), _top(size * factor * call["norm_weight"].double()))
    else:
        magnitude = _top(size) + _top(call["bias"].double()) if "bias" in call else _top(size)
    # Each product of two tiles cuts bits of its sums off.
    bound = error_bound(BF16, case.k, operations=64, magnitude=magnitude)
    return CheckOptions(bound=changed(bound, smallest=bound.smallest + smallest))


# What is not in the call of a function does not apply to it.
FAULTS: dict[str, Fault] = {
    **{
        f"{name} {kind}": fault
        for name in ("a", "b", "input", "residual", "norm_weight", "bias")
        for kind, fault in {
            "longer": replace(name, longer),
            "of another dtype": replace(name, with_dtype(torch.float64)),
            "with three dimensions": replace(
                name, lambda t: t[None] if t.ndim == 2 else t[None, None]
            ),
            "strided": replace(name, strided),
            "a number": put(name, 1.0),
            **({} if name == "bias" else {"missing": put(name, None)}),
        }.items()
    },
    "a of no row": replace("a", lambda t: t[:0]),
    "a with nine rows": replace("a", lambda t: t.new_zeros(9, t.shape[1])),
    "b of no column": replace("b", lambda t: t[:, :0]),
    "b transposed": replace("b", torch.Tensor.t),
    "b with one row more": replace("b", one_row_more),
    "residual with one row more": replace("residual", one_row_more),
    "residual expanded": replace("residual", expanded),
    "residual sliding": replace("residual", sliding),
    **{
        f"{name} {kind}": fault
        for name in ("out", "out_scale", "residual_out", "normed_out")
        for kind, fault in {
            "longer": replace(name, longer),
            "with one row more": replace(name, one_row_more),
            "of another dtype": replace(name, with_dtype(torch.float64)),
            "strided": replace(name, strided),
            "a number": put(name, 1.0),
        }.items()
    },
    "out expanded": replace("out", expanded),
    "out sliding": replace("out", sliding),
    "out_scale expanded": replace("out_scale", expanded),
    "out over residual": replace("out", lambda t: t, "residual"),
    "residual_out over residual": replace("residual_out", lambda t: t, "residual"),
    "normed_out over input": replace("normed_out", lambda t: t, "input"),
    "eps negative": put("eps", -1e-6),
    "eps not a number": put("eps", float("nan")),
    "eps infinite": put("eps", float("inf")),
    "eps text": put("eps", "1e-6"),
    "eps missing": put("eps", None),
    "enable_pdl text": put("enable_pdl", "yes"),
    "enable_pdl a number": put("enable_pdl", 1),
    "weight_ready text": put("weight_ready", "yes"),
    "weight_ready a number": put("weight_ready", 1),
}
FUNCTION_FAULTS: dict[str, dict[str, Fault]] = {
    CODES: {
        "weight longer": replace("weight", longer),
        "weight of another dtype": replace("weight", with_dtype(BF16)),
        "weight of 384 rows": replace("weight", lambda t: t.new_zeros(384, t.shape[1])),
        "weight flat": replace("weight", torch.Tensor.flatten),
        "weight strided": replace("weight", strided),
        "weight a number": put("weight", 1.0),
        "input_scale longer": replace("input_scale", longer),
        "input_scale of another dtype": replace("input_scale", with_dtype(torch.float64)),
        "input_scale flat": replace("input_scale", torch.Tensor.flatten),
        "input_scale missing": put("input_scale", None),
        "weight_scale longer": replace("weight_scale", longer),
        "weight_scale with one row more": replace("weight_scale", one_row_more),
        "weight_scale of another dtype": replace("weight_scale", with_dtype(BF16)),
        "weight_scale a number": put("weight_scale", 1.0),
    },
}
# The reference backend has no vectors.
KERNEL_FAULTS: dict[str, Fault] = {
    f"{name} off its vectors": replace(name, shifted) for name in ("a", "b", "residual")
}
KERNEL_FAULTS["input off its vectors"] = lambda call: (
    replace("input", shifted)(call) if "residual" in call else None  # not codes, which have none
)


def specs() -> list[JitSpec]:
    """The modules of the drawn calls."""
    types = E4M3, E4M3, E4M3
    sizes = product(ROWS[CODES], COLUMNS[CODES], TERMS[CODES])
    problems = [
        GemmProblem(*types, m, n, k, scale="block", activation="swiglu") for m, n, k in sizes if m
    ]
    configs = dict.fromkeys(map(choose_config, problems))
    few = [c for c in few_rows_configs() if c.output is not FewRowsOutput.PRODUCT]
    return [
        *(gen_gemm_sm90_module(config) for config in configs),
        *(gen_few_rows_module(config) for config in few),
        *(gen_one_row_module(config) for config in one_row_configs() if config.norm),
    ]


FAMILY = Family(
    "products with a norm or an activation",
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
