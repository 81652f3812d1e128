"""Concatenation of latent attention's keys under random dtypes, shapes, strides and alignments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import concat_ops
from tests.fuzzing import (
    FLOATING,
    LAYOUTS,
    MAX_ELEMENTS,
    ROWS,
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
)

WIDTHS = st.one_of(st.sampled_from([0, 1, 8, 64, 128, 192, 512]), st.integers(0, 100))
DTYPES = (*FLOATING, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    dtype: torch.dtype
    tokens: int
    heads: int
    widths: tuple[int, int]  # of a head's own part, and of the one that all heads share
    layouts: tuple[Layout, Layout, Layout]
    columns: bool  # the heads' own parts are columns of a wider projection
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens, heads = draw(ROWS), draw(st.sampled_from([1, 1, 2, 3, 16, 128]))
    widths = draw(WIDTHS), draw(WIDTHS)
    while tokens * heads * sum(widths) > MAX_ELEMENTS:
        tokens //= 2
    return Case(
        dtype=draw(st.sampled_from(DTYPES)),
        tokens=tokens,
        heads=heads,
        widths=widths,
        layouts=(draw(LAYOUTS), draw(LAYOUTS), draw(LAYOUTS)),
        columns=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)
    nope, rope = case.widths

    def empty(heads: int, width: int, layout: Layout) -> torch.Tensor:
        return empty_in_layout((case.tokens, heads, width), layout, case.dtype, device)

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        values = torch.randn(tensor.shape, generator=generator, device=device)
        return tensor.copy_(values.to(case.dtype))

    own = empty(case.heads, nope + (40 if case.columns else 0), case.layouts[1])
    return {
        "k": empty(case.heads, nope + rope, case.layouts[0]),
        "k_nope": filled(own[..., :nope]),
        "k_rope": filled(empty(1, rope, case.layouts[2])),
    }


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """A call to which every fault applies."""
    case = Case(torch.bfloat16, 5, 4, (16, 8), (Layout(), Layout(), Layout()), False, 0)
    return build(case, device)


def _inside_k(arguments: dict[str, Any]) -> dict[str, Any] | None:
    k, width = arguments["k"], arguments["k_nope"].shape[-1]
    return {**arguments, "k_nope": k[..., :width]} if k[..., :width].numel() else None


def _other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float16 if tensor.dtype != torch.float16 else torch.bfloat16
    return tensor.float().to(dtype)


FAULTS: dict[str, Fault] = {
    "k double": replace("k", lambda t: t.double()),
    "k longer": replace("k", longer),
    "k with one row more": replace("k", one_row_more),
    "k strided": replace("k", strided),
    "k expanded": replace("k", expanded),
    "k missing": put("k", None),
    "k_nope two-dimensional": replace("k_nope", lambda t: t[:, 0]),
    "k_nope of other tokens": replace("k_nope", one_row_more),
    "k_nope strided": replace("k_nope", strided),
    "k_nope in k": _inside_k,
    "k_nope missing": put("k_nope", None),
    "k_rope of two heads": replace("k_rope", lambda t: torch.cat([t, t], 1)),
    "k_rope of another dtype": replace("k_rope", _other_dtype),
    "k_rope strided": replace("k_rope", strided),
    "k_rope missing": put("k_rope", None),
    "backend unknown": lambda arguments: {**arguments, "backend": "cake"},
}


# The reference takes the dtype of `k_nope` for granted, kernels that of `k`.
KERNEL_FAULTS: dict[str, Fault] = {"k_nope of another dtype": replace("k_nope", _other_dtype)}


FAMILY = Family(
    "concat_mla_k",
    concat_ops,
    ("concat_mla_k",),
    cases(),
    build,
    usual,
    FAULTS,
    kernel_faults=KERNEL_FAULTS,
)


def test_concatenations_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
