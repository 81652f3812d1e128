"""RMS norms, then SiLU or quantisation in blocks, under random dtypes, shapes and layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import norm
from flashinfer.jit import JitSpec
from flashinfer.jit.fused_rmsnorm import FusedRmsnormConfig, gen_fused_rmsnorm_module
from flashinfer.testing import CheckOptions, error_bound
from tests.fuzzing import (
    FLOATING,
    LAYOUTS,
    MAX_ELEMENTS,
    ROWS,
    WIDTHS,
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

BLOCKS = ("fused_add_rmsnorm_fp8_block_quant", "rmsnorm_fp8_block_quant")
FUNCTIONS = (*BLOCKS, "fused_rmsnorm_silu")
BLOCK = 128
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    rows: int
    width: int  # of blocks if they are quantised
    layouts: tuple[Layout, Layout, Layout]  # of the input, of other rows, of the result
    out: str  # "none", "new", "codes" or "input"
    eps: float
    enable_pdl: bool | None
    spread: float
    special: str
    seed: int


USUAL = (Layout(), Layout(), Layout()), "new", 1e-6, None, 1.0, "", 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    function = draw(st.sampled_from(FUNCTIONS))
    width = draw(st.integers(1, 80) if function in BLOCKS else WIDTHS)
    rows = draw(ROWS)
    while rows * width * (BLOCK if function in BLOCKS else 1) > MAX_ELEMENTS:
        rows //= 2
    return Case(
        function=function,
        dtype=draw(st.sampled_from(FLOATING)),
        rows=rows,
        width=width,
        layouts=(draw(LAYOUTS), draw(LAYOUTS), draw(LAYOUTS)),
        out=draw(st.sampled_from(["none", "new", "codes", "input"])),
        eps=draw(st.sampled_from([1e-6, 1e-5, 0.1, 3])),
        enable_pdl=draw(st.sampled_from([None, True, False])),
        spread=draw(st.sampled_from([1e-3, 1.0, 1.0, 100.0])),
        special=draw(st.sampled_from(["", "", "zero row", "nan", "inf"])),
        seed=draw(st.integers(0, 2**31)),
    )


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`; rows that are quantised in blocks begin on 16 bytes."""
    generator = torch.Generator(device).manual_seed(case.seed)
    in_blocks = case.function in BLOCKS
    unit = 16 if in_blocks else 1
    hidden_size = case.width * (BLOCK if in_blocks else 1)
    layouts = [Layout(unit * part.offset, unit * part.gap) for part in case.layouts]

    def empty(layout: Layout, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return empty_in_layout((case.rows, hidden_size), layout, dtype, device)

    def rows(layout: Layout) -> torch.Tensor:
        values = torch.randn(case.rows, hidden_size, generator=generator, device=device)
        values *= case.spread
        if case.special and values.numel():
            values[0, -1] = float(case.special.replace("zero row", "0"))
            if case.special == "zero row":
                values[0] = 0
        return empty(layout).copy_(values)

    x = rows(layouts[0])
    weight = empty_in_layout((hidden_size,), Layout(layouts[1].offset), case.dtype, device)
    weight.copy_(torch.randn(hidden_size, generator=generator, device=device))
    arguments: dict[str, Any] = {"input": x, "weight": weight, "eps": case.eps}
    if not in_blocks:
        if case.out == "input":
            return arguments | {"out": x}
        if case.out == "none":
            return arguments
        dtype = E4M3 if case.out == "codes" else case.dtype
        return arguments | {"out": empty(layouts[2], dtype)}
    arguments["out"] = empty(layouts[2], E4M3)
    arguments["block_scale"] = torch.empty(case.width, -(-case.rows // 4) * 4, device=device)
    arguments["enable_pdl"] = case.enable_pdl
    if "fused_add" in case.function:
        arguments["residual"] = rows(layouts[1])
        arguments["normed_out"] = x if case.out == "input" else empty(layouts[2])
    return arguments


def _off_sixteen_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.numel() == 0:
        return None
    storage = tensor.new_zeros(tensor.numel() + 8)
    return storage[1 : 1 + tensor.numel()].view(tensor.shape)


def _of_blocks(name: str) -> Fault:
    """Fault of alignment, which only quantisation in blocks asks for."""
    fault = replace(name, _off_sixteen_bytes)
    return lambda arguments: fault(arguments) if "block_scale" in arguments else None


def _in_rows(scale: torch.Tensor) -> torch.Tensor | None:
    return None if scale.shape[0] == scale.shape[1] else scale.t().contiguous()


def _without_padding(scale: torch.Tensor) -> torch.Tensor | None:
    return scale[:, 1:].contiguous() if scale.numel() else None


def _same(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor.numel() else None


def _only_with(name: str, fault: Fault) -> Fault:
    return lambda arguments: fault(arguments) if name in arguments else None


FAULTS: dict[str, Fault] = {
    "input missing": put("input", None),
    "input strided": replace("input", strided),
    "input of doubles": replace("input", with_dtype(torch.float64)),
    "input one-dimensional": replace("input", lambda t: t.reshape(-1)),
    "input three-dimensional": replace("input", lambda t: t[None]),
    "weight missing": put("weight", None),
    "weight longer": replace("weight", longer),
    "weight strided": replace("weight", strided),
    "weight of doubles": replace("weight", with_dtype(torch.float64)),
    "residual missing": put("residual", None),
    "residual longer": replace("residual", longer),
    "residual with one row more": replace("residual", one_row_more),
    "residual of doubles": replace("residual", with_dtype(torch.float64)),
    "residual expanded": replace("residual", expanded),
    "residual sliding": replace("residual", sliding),
    "residual is the input": _only_with("residual", replace("residual", _same, "input")),
    "normed_out missing": put("normed_out", None),
    "normed_out longer": replace("normed_out", longer),
    "normed_out of doubles": replace("normed_out", with_dtype(torch.float64)),
    "normed_out is the residual": _only_with(
        "normed_out", replace("normed_out", _same, "residual")
    ),
    "out longer": replace("out", longer),
    "out with one row more": replace("out", one_row_more),
    "out of doubles": replace("out", with_dtype(torch.float64)),
    "out strided": replace("out", strided),
    "out expanded": replace("out", expanded),
    "out a list": put("out", [1]),
    "block_scale of halves": replace("block_scale", with_dtype(torch.float16)),
    "block_scale without padding": replace("block_scale", _without_padding),
    "block_scale in rows": replace("block_scale", _in_rows),
    "block_scale strided": replace("block_scale", strided),
    "eps negative": put("eps", -1.0),
    "eps not a number": put("eps", float("nan")),
    "eps beyond float32": put("eps", 1e39),
    "eps text": put("eps", "1e-6"),
    "enable_pdl text": put("enable_pdl", "yes"),
}


def _out_over_input(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """One element further than the input, whose dtype the result may have without blocks."""
    out = None if "block_scale" in arguments else shifted(arguments["input"])
    return None if out is None else {**arguments, "out": out}


FAULTS["out shifted from input"] = _out_over_input
# Only kernels have vectors.
ALIGNMENT_FAULTS: dict[str, Fault] = {
    "input off its vectors": _of_blocks("input"),
    "weight off its vectors": _of_blocks("weight"),
    "residual off its vectors": _of_blocks("residual"),
    "normed_out off its vectors": _of_blocks("normed_out"),
    "out off its vectors": _of_blocks("out"),
}


def _options(case: Case, arguments: dict[str, Any]) -> CheckOptions | None:
    """SiLU of a negative number is a product of two factors, of which one has an absolute error."""
    if case.function in BLOCKS:
        return None
    width = max(case.width, 1)
    largest = arguments["weight"].abs().max().item() if case.width else 0.0
    dtype = E4M3 if case.out == "codes" else case.dtype
    return CheckOptions(bound=error_bound(dtype, width, magnitude=largest * width**0.5))


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """A call to which every fault that concerns the function applies."""
    width = 2 if function in BLOCKS else 256
    return build(Case(function, torch.bfloat16, 6, width, *USUAL), device)


def specs() -> list[JitSpec]:
    configs = []
    for dtype in FLOATING:
        name = str(dtype).removeprefix("torch.")
        configs += [FusedRmsnormConfig(dtype, "e4m3_blocks", add) for add in (False, True)]
        configs += [FusedRmsnormConfig(dtype, o, silu=True) for o in (name, "float8_e4m3fn")]
    return [gen_fused_rmsnorm_module(config) for config in configs]


FAMILY = Family(
    "fused norms",
    norm,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    kernel_faults=ALIGNMENT_FAULTS,
    options=_options,
    specs=specs,
)


def test_fused_norms_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
