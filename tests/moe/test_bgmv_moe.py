"""LoRA in mixtures: products of pairs, tables of addresses and plans, against loops in float64."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from flashinfer.fused_moe import (
    BGMVMoEPortablePlan,
    bgmv_moe,
    bgmv_moe_expand,
    bgmv_moe_shrink,
    fill_w_ptr,
    has_bgmv_moe,
    prepare_bgmv_moe,
)
from tests.moe.adapters import BF16, Case, assert_near, table_of


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")


def test_whether_there_are_kernels(device: torch.device) -> None:
    assert has_bgmv_moe() is (device.type == "cuda")


# ---- both products -----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [8, 16, 64, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("columns", [(40,), (24, 24), (8, 64, 16)])
def test_what_adapters_add(
    device: torch.device, rank: int, dtype: torch.dtype, columns: tuple[int, ...]
) -> None:
    case = Case.random(device, rank=rank, dtype=dtype, columns=columns, seed=rank)
    out = bgmv_moe(**case.call(), output_dim=sum(columns))
    assert out.dtype == dtype
    assert_near(out, case.summed(case.expanded(case.shrunk().to(dtype))))
    assert torch.equal(out, bgmv_moe(**case.call()))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_batches(device: torch.device, index: torch.dtype) -> None:
    """Empty ones, one token, and more rows than a tile has."""
    for tokens, top_k in ((0, 2), (3, 0), (1, 1), (1, 4), (100, 6)):
        case = Case.random(device, tokens=tokens, top_k=top_k, index=index)
        out = bgmv_moe(**case.call())
        assert_near(out, case.summed(case.expanded(case.shrunk().to(BF16))))


def test_no_adapter_adds_nothing(device: torch.device) -> None:
    case = Case.random(device)
    case.adapters.fill_(-1)
    for weight in (*case.first, *case.second):
        weight.fill_(float("nan"))
    assert not bool(bgmv_moe(**case.call()).any())


def test_more_matrices_than_a_product_takes(device: torch.device) -> None:
    case = Case.random(device, tokens=40, adapters=5, experts=300, hidden=16, columns=(8,))
    out = bgmv_moe(**case.call())
    assert_near(out, case.summed(case.expanded(case.shrunk().to(BF16))))


FAULTS: dict[str, Any] = {
    "x": lambda case: case.x[:, :-8],
    "lora_a_weights": lambda case: [w[:, :, :12] for w in case.first],
    "lora_b_weights": lambda case: case.second + case.second,
    "sorted_token_ids": lambda case: case.tokens.float(),
    "expert_ids": lambda case: case.experts[1:],
    "lora_indices": lambda case: case.adapters.int()[None],
    "topk_weights": lambda case: case.weights.double(),
    "num_experts": lambda case: 4,
    "output_dim": lambda case: 41,
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_refused_by_name(device: torch.device, name: str) -> None:
    case = Case.random(device)
    with pytest.raises((TypeError, ValueError), match=f"`{name}"):
        bgmv_moe(**{**case.call(), name: FAULTS[name](case)})


# ---- one product, and tables -------------------------------------------------------------------


@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize("slices", [1, 3])
def test_shrink_adds(device: torch.device, by_pair: bool, slices: int) -> None:
    case = Case.random(device, columns=(40,) * slices)
    table, stride = table_of(case.first)
    rows = torch.randn(len(case.tokens), 72, device=device).to(BF16) if by_pair else None
    y = torch.randn(slices, len(case.tokens), 16, device=device)
    target = y.double() + case.shrunk(rows)
    x = case.x if rows is None else rows
    bgmv_moe_shrink(y, x, table, **case.pairs(), lora_stride=stride, per_pair_input=by_pair)
    assert_near(y, target)


@pytest.mark.parametrize("finalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_expand_adds(device: torch.device, finalize: bool, dtype: torch.dtype) -> None:
    case = Case.random(device, columns=(32, 32))
    table, stride = table_of(case.second)
    x = torch.randn(2, len(case.tokens), 16, device=device).to(dtype)
    y = torch.randn(len(case.x) if finalize else len(case.tokens), 72, device=device)
    rows = case.expanded(x.to(BF16))
    target = y.double()
    starts = torch.tensor([36, 2], dtype=torch.int32, device=device)  # in any order, with gaps
    added = case.summed(rows) if finalize else rows
    target[:, 36:68] += added[:, :32]
    target[:, 2:34] += added[:, 32:]
    bgmv_moe_expand(
        y,
        x,
        table,
        case.tokens,
        case.experts,
        case.weights,
        case.adapters,
        starts,
        [32, 32],
        stride,
        finalize=finalize,
    )
    assert_near(y, target)


def _shrink(case: Case, table: torch.Tensor, stride: int) -> torch.Tensor:
    slices = table.shape[0] if table.ndim == 2 else 1
    y = torch.zeros(slices, len(case.tokens), 16, device=case.x.device)
    bgmv_moe_shrink(y, case.x, table, **case.pairs(), lora_stride=stride)
    return y


def test_a_table_holds_addresses_and_keeps_the_weights(device: torch.device) -> None:
    case = Case.random(device, columns=(40, 40))
    target = case.shrunk()
    table, stride = table_of(case.first)
    weight = case.first[1]
    assert stride == weight.stride(0)
    step = weight.stride(1) * weight.element_size()
    assert table[1].tolist() == [weight.data_ptr() + e * step for e in range(5)]
    case.first = [torch.empty_like(w) for w in case.first]
    del weight
    gc.collect()
    assert_near(_shrink(case, table, stride), target)


def test_views_of_slices_are_tables(device: torch.device) -> None:
    case = Case.random(device, columns=(40, 40))
    both = torch.zeros(2, 2, 5, dtype=torch.int64, device=device)
    strides = [fill_w_ptr(both[1], w, 5, s) for s, w in enumerate(case.first)]
    fill_w_ptr(both[0, 1], case.first[0], 5, 0)
    target = case.shrunk()
    assert_near(_shrink(case, both[1], strides[0]), target)
    assert_near(_shrink(case, both[1, 1], strides[0]), target[1:])
    assert_near(_shrink(case, both[0, 1:], strides[0]), target[:1])
    with pytest.raises(ValueError, match="`w_ptr` must be a table whose 2 slices"):
        _shrink(case, both[0], strides[0])


def test_what_is_written_to_weights_counts(device: torch.device) -> None:
    case = Case.random(device)
    table, stride = table_of(case.first)
    case.first[0].mul_(2)
    assert_near(_shrink(case, table, stride), case.shrunk())


def test_a_slice_may_be_filled_again(device: torch.device) -> None:
    case = Case.random(device)
    table, _ = table_of([torch.ones_like(case.first[0])])
    stride = fill_w_ptr(table, case.first[0], 5, 0)
    assert_near(_shrink(case, table, stride), case.shrunk())


def test_addresses_of_others_are_refused(device: torch.device) -> None:
    case = Case.random(device)
    table, stride = table_of(case.first)
    for other in (table.clone(), torch.zeros_like(table), table[0, :4]):
        with pytest.raises(ValueError, match="`w_ptr` must be a table whose 1 slices fill_w_ptr"):
            _shrink(case, other, stride)
    with pytest.raises(ValueError, match="`lora_stride` must be"):
        _shrink(case, table, stride + 8)
    table[0, 0] += 16
    with pytest.raises(ValueError, match="`w_ptr` must not be written to after fill_w_ptr"):
        _shrink(case, table, stride)
    # A fill of one slice does not make what others wrote into another one good.
    table, stride = table_of(case.first * 2)
    table[0, 0] += 16
    fill_w_ptr(table, case.first[0], 5, 1)
    with pytest.raises(ValueError, match="`w_ptr` must be a table"):
        _shrink(case, table, stride)


def test_what_no_table_can_be(device: torch.device) -> None:
    weight = torch.ones(2, 5, 8, 16, dtype=BF16, device=device)
    table = torch.zeros(1, 5, dtype=torch.int64, device=device)
    with torch.inference_mode():
        uncounted = torch.zeros_like(table)
    for arguments, name in (
        ((table.int(), weight, 5, 0), "w_ptr"),
        ((table[:, :4], weight, 5, 0), "w_ptr"),
        ((table[None], weight, 5, 0), "w_ptr"),
        ((uncounted, weight, 5, 0), "w_ptr"),
        ((table, weight.float(), 5, 0), "weights"),
        ((table, weight[:, :4].contiguous(), 5, 0), "weights"),
        ((table, weight.mT, 5, 0), "weights"),
        ((table, weight[:0], 5, 0), "weights"),
        ((table, weight, 5, 1), "slice_id"),
        ((table, weight, 0, 0), "num_experts"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
            fill_w_ptr(*arguments)
    assert not bool(table.any())


def test_columns_must_be_those_of_the_table(device: torch.device) -> None:
    case = Case.random(device)
    table, stride = table_of(case.second)
    x, y = torch.ones(1, len(case.tokens), 16, device=device), torch.zeros(9, 40, device=device)
    pairs = case.tokens, case.experts, case.weights, case.adapters, case.starts()
    with pytest.raises(ValueError, match="`output_slices`"):
        bgmv_moe_expand(y, x, table, *pairs, [32], stride)
    with pytest.raises(ValueError, match="`y`"):
        bgmv_moe_expand(y[:, 8:], x, table, *pairs, [40], stride)


# ---- plans -------------------------------------------------------------------------------------


def test_a_plan_reads_its_tensors_anew(device: torch.device) -> None:
    case = Case.random(device, columns=(24, 16))
    memory = {
        "shrink_out": torch.full((2, len(case.tokens), 16), float("nan"), device=device),
        "y_accum": torch.full((len(case.x), 40), float("nan"), device=device),
    }
    plan = prepare_bgmv_moe(**case.call(), **memory)
    assert isinstance(plan, BGMVMoEPortablePlan)
    assert plan.backend_used == "portable" and plan.schedule_id is None and plan.fallback_reason
    first = plan.run()
    assert first is memory["y_accum"] and first.dtype == torch.float32
    assert_near(first, case.summed(case.expanded(case.shrunk().to(BF16))))
    before = first.clone()
    assert torch.equal(plan.run(), before)
    case.x.mul_(-2)
    assert torch.equal(plan.run(), -2 * before)
    plan.close()
    plan.close()
    with pytest.raises(RuntimeError, match="closed"):
        plan.run()


def test_a_plan_in_a_graph(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("captures a CUDA graph")
    case = Case.random(device, tokens=50, adapters=5, experts=300, hidden=64)
    plan = prepare_bgmv_moe(**case.call())
    expected = plan.run().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = plan.run()
    result.fill_(float("nan"))
    graph.replay()
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"backend": "blackwell"}, "backend"),
        ({"fallback": False}, "fallback"),
        ({"fallback": 1}, "fallback"),
        ({"grouped": True}, "grouped"),
        ({"order_remap": False}, "order_remap"),
        ({"shrink_out": torch.empty(1, 2, 3)}, "shrink_out"),
        ({"y_accum": torch.empty(9, 40, dtype=BF16)}, "y_accum"),
        ({"num_experts": 3}, "num_experts"),
    ],
)
def test_what_no_plan_can_be(device: torch.device, changes: dict[str, Any], name: str) -> None:
    case = Case.random(device)
    with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
        prepare_bgmv_moe(**{**case.call(), **changes})
