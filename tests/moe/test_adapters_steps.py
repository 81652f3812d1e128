"""The steps of LoRA in mixtures around their kernels, on the CPU.

Stand-ins do what the kernels' documentation says, and leave garbage where it says nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer._common import checks
from flashinfer._moe import adapters as steps
from flashinfer._moe.maps import RowMap
from flashinfer.fused_moe import bgmv_moe, prepare_bgmv_moe
from flashinfer.fused_moe.adapters import expand_pairs, shrink_pairs
from flashinfer.gemm._choice import GemmProblem
from flashinfer.reference_backend import is_active
from tests.moe.adapters import BF16, Case, assert_near

pytestmark = pytest.mark.skipif(is_active(), reason="the reference backend takes no steps")
GARBAGE = 2**30 + 7


def _map_rows(chosen: torch.Tensor, first: int, count: int) -> RowMap:
    assert chosen.dtype == torch.int32 and chosen.is_contiguous() and 1 <= count <= 1024
    own = chosen.flatten().long() - first
    here = (own >= 0) & (own < count)
    order = torch.argsort(torch.where(here, own, count), stable=True)[: int(here.sum())]
    rows = RowMap.empty(chosen, count)
    rows.row_token.fill_(GARBAGE)
    rows.row_token[: len(order)] = (order // chosen.shape[1]).int()
    rows.entry_row.fill_(-1)
    rows.entry_row.view(-1)[order] = torch.arange(len(order), dtype=torch.int32)
    rows.offsets.copy_(torch.tensor([int((here & (own < e)).sum()) for e in range(count + 1)]))
    return rows


def _launch(
    problem: GemmProblem,
    names: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **rest: Any,
) -> torch.Tensor:
    offsets, indices, row_index, row_weight = rest["rows"]
    assert names == "x" and indices is None and row_weight is None
    assert problem.batches == b.shape[0] == len(offsets) - 1 and problem.rows == out.shape[0]
    assert a.dtype == b.dtype == out.dtype and problem.gathers and row_index.dtype == torch.int32
    out.fill_(float("nan"))  # rows of no matrix are not written
    for g, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        rows = a[row_index[begin:end].long()].double() @ b[g].double().T
        out[begin:end] = rows.to(out.dtype)
    return out


def _combine(
    out: torch.Tensor, rows: torch.Tensor, entry_row: torch.Tensor, scales: torch.Tensor
) -> None:
    assert scales.shape == entry_row.shape and scales.is_contiguous()
    exists = entry_row >= 0
    chosen = rows[torch.where(exists, entry_row, 0).long()].float()
    chosen = torch.where(exists[..., None], chosen, 0) * scales[..., None]
    out.copy_(chosen.sum(1))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "cuda_tensors", lambda **tensors: None)
    for name, stand_in in (("map_rows", _map_rows), ("launch", _launch), ("combine", _combine)):
        monkeypatch.setattr(steps, name, stand_in)


CPU = torch.device("cpu")
CASES: list[dict[str, Any]] = [
    {},
    {"index": torch.int32, "columns": (24, 40), "dtype": torch.float16},
    {"tokens": 30, "adapters": 7, "experts": 300, "hidden": 16, "columns": (8,)},
    {"tokens": 1, "top_k": 1},
    {"tokens": 0},
    {"tokens": 4, "top_k": 0},
]


@pytest.mark.parametrize("sizes", CASES)
def test_both_products(sizes: dict[str, Any]) -> None:
    case = Case.random(CPU, **sizes)
    target = case.summed(case.expanded(case.shrunk().to(case.x.dtype)))
    assert_near(bgmv_moe(**case.call()), target)
    assert_near(prepare_bgmv_moe(**case.call()).run(), target)


@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize("by_pair", [False, True])
def test_one_product_is_added(sizes: dict[str, Any], by_pair: bool) -> None:
    case = Case.random(CPU, **sizes)
    pairs, (rank, hidden) = len(case.tokens), case.first[0].shape[2:]
    rows = torch.randn(pairs, hidden).to(case.x.dtype) if by_pair else None
    y = torch.randn(len(case.first), pairs, rank)
    target = y.double() + case.shrunk(rows)
    shrink_pairs(y, case.x if rows is None else rows, case.first, *case.pairs().values(), by_pair)
    assert_near(y, target)
    columns = sum(weight.shape[2] for weight in case.second)
    x, out = torch.randn(y.shape), torch.randn(pairs if by_pair else len(case.x), columns)
    products = case.expanded(x.to(case.x.dtype))
    target = out.double() + (products if by_pair else case.summed(products))
    arguments = case.tokens, case.experts, case.weights, case.adapters, case.starts()
    expand_pairs(out, x, case.second, *arguments, not by_pair)
    assert_near(out, target)


@pytest.mark.parametrize("start", [-(2**31), -8, 8, 2**31 - 1])
@pytest.mark.parametrize("by_pair", [False, True])
def test_columns_beyond_the_result_get_nothing(start: int, by_pair: bool) -> None:
    case = Case.random(CPU)
    x = torch.randn(1, len(case.tokens), case.first[0].shape[2])
    second, width = case.second[:1], case.second[0].shape[2]
    out = torch.randn(len(case.tokens) if by_pair else len(case.x), width)
    whole = torch.zeros_like(out)
    arguments = case.tokens, case.experts, case.weights, case.adapters
    expand_pairs(whole, x, second, *arguments, torch.tensor([0]), not by_pair)
    target = out.clone()
    for column in range(width):
        if 0 <= start + column < width:
            target[:, start + column] += whole[:, column]
    expand_pairs(out, x, second, *arguments, torch.tensor([start]), not by_pair)
    assert torch.equal(out, target)


def test_adapters_come_in_parts_that_cover_all() -> None:
    matrix = torch.zeros(3, dtype=torch.int32)
    for adapters, experts in ((1, 1), (4, 256), (5, 300), (3, 1024), (1025, 1)):
        parts = steps.Part.of_pairs(matrix, adapters, experts)
        bounds = [part.matrices for part in parts]
        assert [b.start for b in bounds[1:]] == [b.stop for b in bounds[:-1]]
        assert bounds[0].start == 0 and bounds[-1].stop == adapters * experts
        assert all(b.start % experts == 0 and b.stop - b.start <= 1024 for b in bounds)


def test_sums_of_tokens_have_the_order_of_their_rows() -> None:
    big = 2.0**24
    rows = torch.tensor([[big], [1.0], [1.0], [5.0], [1.0], [1.0], [big], [9.0]])
    tokens = torch.tensor([0, 0, 0, 2, 3, 3, 3, 4])  # token 4 is none of the four
    total = steps.sum_by_token(rows, tokens, 4)
    # One at a time, 1 is lost in 2^24; added to each other first, they are not.
    assert total.flatten().tolist() == [big, 0.0, 5.0, big + 2]


def test_pairs_without_a_matrix() -> None:
    tokens, experts = torch.tensor([0, 1, 2, 3, -1, 0, 0]), torch.tensor([4, 4, 4, 4, 4, 5, -1])
    adapters = torch.tensor([1, -1, 2])
    found = steps.find_matrices(tokens, experts.int(), adapters, 2, 5)
    assert found.dtype == torch.int32 and found.tolist() == [9, -1, -1, -1, -1, -1, -1]


def test_products_are_rounded_once_before_they_are_weighted() -> None:
    case = Case.random(CPU, tokens=6)
    rows = case.expanded(case.shrunk().to(BF16)).to(BF16).double()
    between = case.shrunk().to(BF16).float()
    out = torch.zeros(6, 40)
    arguments = case.tokens, case.experts, case.weights, case.adapters, case.starts()
    expand_pairs(out, between, case.second, *arguments)
    assert torch.allclose(out.double(), case.summed(rows), rtol=1e-5, atol=1e-5)
