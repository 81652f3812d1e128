"""Sampling and top-k under random shapes, strides, dtypes, parameters and awkward rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashinfer
from flashinfer.testing import CheckOptions, assert_matches_reference
from tests.fuzzing import CPU_EXAMPLES, FLOATING, fuzz_settings

WIDTHS = st.one_of(
    st.sampled_from([1, 2, 3, 8, 31, 128, 129, 1000, 4095, 4096, 4097, 8200]), st.integers(1, 700)
)
TOP_K = st.one_of(st.sampled_from([-1, 0, 1, 2, 50, 300, 10**6]), st.integers(1, 900))
SHARE = st.one_of(st.sampled_from([0.0, 1.0, 0.9, 1.5, -0.5, 1e-6]), st.floats(0, 1))
ROWS_OF_KINDS = ["plain", "plain", "ties", "one_hot", "zero", "nan", "inf", "negative", "denormal"]


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    rows: int
    width: int
    gap: int
    offset: int
    kinds: tuple[str, ...]
    per_row: bool
    top_k: int
    top_p: float
    order: str
    seed: int


FILTERS = {
    "softmax": ("temperature",),
    "sampling_from_probs": (),
    "sampling_from_logits": (),
    "top_p_sampling_from_probs": ("top_p",),
    "top_k_sampling_from_probs": ("top_k",),
    "min_p_sampling_from_probs": ("min_p",),
    "top_k_top_p_sampling_from_probs": ("top_k", "top_p"),
    "top_k_top_p_sampling_from_logits": ("top_k", "top_p"),
    "top_k_renorm_probs": ("top_k",),
    "top_p_renorm_probs": ("top_p",),
    "top_k_mask_logits": ("top_k",),
    "top_k": ("k",),
}
CASES = st.builds(
    Case,
    function=st.sampled_from(list(FILTERS)),
    dtype=st.sampled_from(FLOATING),
    rows=st.sampled_from([0, 1, 2, 5, 9]),
    width=WIDTHS,
    gap=st.sampled_from([0, 0, 1, 3, 8]),
    offset=st.sampled_from([0, 0, 1, 2, 4]),
    kinds=st.lists(st.sampled_from(ROWS_OF_KINDS), min_size=1, max_size=5).map(tuple),
    per_row=st.booleans(),
    top_k=TOP_K,
    top_p=SHARE,
    order=st.sampled_from(["top_k_first", "joint"]),
    seed=st.integers(0, 2**31),
)


def _rows(case: Case, logits: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    values = torch.randn(case.rows, case.width, generator=generator) * 3
    if not logits:
        values = torch.softmax(values, -1)
    for i in range(case.rows):
        kind, where = case.kinds[i % len(case.kinds)], case.seed % case.width
        if kind == "ties":
            values[i] = (values[i] * 4).round() / 4 if logits else 1.0 / case.width
        elif kind == "one_hot":
            values[i] = -math.inf if logits else 0.0
            values[i, where] = 1.0
        elif kind == "zero":
            values[i] = -math.inf if logits else 0.0
        elif kind in ("nan", "inf"):
            values[i, where] = float(kind)
        elif kind == "negative":
            values[i, : case.width // 2] = -1.0
        elif kind == "denormal" and not logits:
            values[i] *= 1e-40
    return values


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of a case."""
    logits = case.function.endswith("logits") or case.function in ("softmax", "top_k")
    name = "input" if case.function == "top_k" else "logits" if logits else "probs"
    values = _rows(case, logits)
    stride = case.width + case.gap
    storage = torch.full((case.offset + case.rows * stride,), math.nan, dtype=case.dtype)
    rows = storage[case.offset :].view(case.rows, stride)[:, : case.width].copy_(values)
    whole = storage.to(device)
    arguments: dict[str, Any] = {
        name: whole.as_strided(rows.shape, (stride, 1), case.offset)
        if case.rows
        else torch.empty(0, case.width, dtype=case.dtype, device=device)
    }
    numbers = {
        "temperature": max(case.top_p, 0.0),
        "top_k": case.top_k,
        "top_p": case.top_p,
        "min_p": case.top_p,
        "k": min(max(case.top_k, 1), case.width),
    }
    for parameter in FILTERS[case.function]:
        value = numbers[parameter]
        if case.per_row and parameter != "k":
            dtype = torch.int32 if parameter == "top_k" else torch.float32
            arguments[parameter] = torch.full((case.rows,), value, dtype=dtype, device=device)
        else:
            arguments[parameter] = value
    if "sampling" in case.function:
        arguments["seed"] = (
            torch.arange(case.rows, device=device) + case.seed if case.per_row else case.seed
        )
        if "top_k_top_p" in case.function:
            arguments["filter_apply_order"] = case.order
    return arguments


def assert_kept(case: Case, row: torch.Tensor, token: int) -> None:
    """The filters of the case keep the token, but for the rounding of a share."""
    if row.isnan().any() or row.max() == -math.inf:
        assert token == 0
        return
    assert 0 <= token < case.width
    value, seen = row[token], torch.ones_like(row, dtype=torch.bool)
    weights = torch.exp(row - row.max())
    if row.max() == math.inf:
        weights = (row == math.inf).double()
    assert weights[token] > 0
    if "top_k" in FILTERS[case.function] and 1 <= case.top_k < case.width:
        kth = row.sort(descending=True).values[case.top_k - 1]
        assert value >= kth
        seen = row >= kth if case.order == "top_k_first" else seen
    if "top_p" in FILTERS[case.function] and case.top_p < 1:
        larger = weights[seen & (row > value)].sum() / weights[seen].sum()
        assert larger <= max(case.top_p, 0.0) + 1e-4


def check(case: Case, device: torch.device) -> None:
    """The call is right, of the same result once more, and reads nothing beyond its rows."""
    arguments = build(case, device)
    api = getattr(flashinfer, case.function)
    # An exponential of arguments of up to a hundred is good to some hundred roundings.
    options = CheckOptions(accumulation_length=65536, check_bias=False)
    if "from_logits" in case.function and device.type == "cuda":
        # A draw may fall between two roundings of an exponential: look at where it must be.
        tokens = api(**arguments)
        assert torch.equal(tokens, api(**arguments))
        for row, token in zip(arguments["logits"].double().cpu(), tokens.tolist(), strict=True):
            assert_kept(case, row, token)
        return
    if not (case.per_row and case.rows == 1):  # one number of one row is both
        assert_matches_reference(api, options, **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("function", FILTERS)
def test_accepted_calls_are_right(function: str, full: bool):
    @fuzz_settings(500 if full else 25)
    @given(case=CASES)
    def run(case: Case) -> None:
        check(replace(case, function=function), torch.device("cuda"))

    run()


@fuzz_settings(CPU_EXAMPLES)
@given(case=CASES)
def test_accepted_calls_run_on_the_reference_backend(case: Case):
    with flashinfer.reference_backend():
        check(case, torch.device("cpu"))
