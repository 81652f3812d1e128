"""Deltas of adapters for a mixture's first product and its result, against loops in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.fused_moe import bgmv_moe_gemm1_lora_delta, bgmv_moe_gemm2_lora_delta
from tests.moe.adapters import BF16, assert_near, table_of

TOKENS, TOP_K, ADAPTERS, EXPERTS, RANK, HIDDEN, INTERMEDIATE = 7, 3, 3, 5, 16, 72, 40


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")


def weights(*shape: int, device: torch.device, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(ADAPTERS, EXPERTS, *shape) / shape[-1] ** 0.5).to(device, dtype)


def choices(device: torch.device, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of tokens, one of which does not exist, and adapters, of which some tokens have
    none."""
    chosen = torch.randint(0, EXPERTS, (tokens, TOP_K), dtype=torch.int32)
    chosen[1:2, 0] = EXPERTS
    return chosen.to(device), (torch.arange(tokens) % (ADAPTERS + 1) - 1).to(device)


def product(
    row: torch.Tensor, first: torch.Tensor, second: torch.Tensor, adapter: int, expert: int
) -> torch.Tensor:
    """Both products of one row; zeros without a matrix."""
    if not (0 <= adapter < ADAPTERS and 0 <= expert < EXPERTS):
        return torch.zeros(second.shape[2], dtype=torch.float64, device=row.device)
    between = (first[adapter, expert].double() @ row.double()).to(first.dtype)
    return second[adapter, expert].double() @ between.double()


def first_call(device: torch.device, shared: bool, dtype: torch.dtype) -> dict[str, Any]:
    slices, rows = (1, 2 * INTERMEDIATE) if shared else (2, INTERMEDIATE)
    first = [weights(RANK, HIDDEN, device=device, dtype=dtype) for _ in range(slices)]
    second = [weights(rows, RANK, device=device, dtype=dtype) for _ in range(slices)]
    return {"first": first, "second": second, "x": torch.randn(TOKENS, HIDDEN, device=device)}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gates_and_values(device: torch.device, shared: bool, dtype: torch.dtype) -> None:
    parts = first_call(device, shared, dtype)
    (a, stride_a), (b, stride_b) = table_of(parts["first"]), table_of(parts["second"])
    if shared:
        a, b = a[0], b[0]
    chosen, own = choices(device)
    out = bgmv_moe_gemm1_lora_delta(
        parts["x"],
        a,
        stride_a,
        b,
        stride_b,
        chosen,
        own,
        RANK,
        INTERMEDIATE,
        lora_dtype=dtype,
        scale=-0.5,
        out_dtype=torch.float32,
    )
    assert out.dtype == torch.float32
    target = torch.zeros(TOKENS, TOP_K, 2 * INTERMEDIATE, dtype=torch.float64, device=device)
    for t in range(TOKENS):
        for j in range(TOP_K):
            both = [
                product(parts["x"][t].to(dtype), first, second, int(own[t]), int(chosen[t, j]))
                for first, second in zip(parts["first"], parts["second"], strict=True)
            ]
            target[t, j] = -0.5 * torch.cat(both)
    assert_near(out, target)
    assert not bool(out[own < 0].any()) and not bool(out[1, 0].any())


@pytest.mark.parametrize("one_dimension", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float16, torch.float32])
def test_results(device: torch.device, one_dimension: bool, out_dtype: torch.dtype) -> None:
    first, second = weights(RANK, INTERMEDIATE, device=device), weights(HIDDEN, RANK, device=device)
    (a, stride_a), (b, stride_b) = table_of([first]), table_of([second])
    if one_dimension:
        a, b = a[0], b[0]
    chosen, own = choices(device)
    rows = torch.randn(TOKENS * TOP_K + 9, INTERMEDIATE, device=device)
    index = torch.randperm(len(rows))[: TOKENS * TOP_K].int()
    index[4], index[8] = -1, len(rows)
    unused = torch.ones(len(rows), dtype=torch.bool)
    unused[index[(index >= 0) & (index < len(rows))].long()] = False
    rows[unused.to(device)] = float("nan")
    factors = torch.randn(TOKENS, TOP_K, device=device)
    out = bgmv_moe_gemm2_lora_delta(
        rows,
        index.to(device),
        a,
        stride_a,
        b,
        stride_b,
        chosen,
        factors,
        own,
        RANK,
        HIDDEN,
        scale=2.0,
        out_dtype=out_dtype,
    )
    assert out.dtype == out_dtype
    target = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64, device=device)
    for t in range(TOKENS):
        for j in range(TOP_K):
            row = int(index[t * TOP_K + j])
            if 0 <= row < len(rows):
                one = product(rows[row].to(BF16), first, second, int(own[t]), int(chosen[t, j]))
                target[t] += 2.0 * float(factors[t, j]) * one
    assert_near(out, target)


def test_nothing_gives_nothing(device: torch.device) -> None:
    parts = first_call(device, False, BF16)
    (a, stride_a), (b, stride_b) = table_of(parts["first"]), table_of(parts["second"])
    chosen, own = choices(device, 0)
    out = bgmv_moe_gemm1_lora_delta(
        parts["x"][:0], a, stride_a, b, stride_b, chosen, own, RANK, INTERMEDIATE
    )
    assert out.shape == (0, TOP_K, 2 * INTERMEDIATE) and out.dtype == BF16
    # No row between the products: none of the choices is here.
    first, second = weights(RANK, INTERMEDIATE, device=device), weights(HIDDEN, RANK, device=device)
    (a, stride_a), (b, stride_b) = table_of([first]), table_of([second])
    chosen, own = choices(device)
    index = torch.full((TOKENS * TOP_K,), -1, device=device)
    rows, factors = torch.empty(0, INTERMEDIATE, device=device), torch.ones(TOKENS, TOP_K)
    factors = factors.to(device)
    out = bgmv_moe_gemm2_lora_delta(
        rows, index, a, stride_a, b, stride_b, chosen, factors, own, RANK, HIDDEN
    )
    assert out.shape == (TOKENS, HIDDEN) and not bool(out.any())


FIRST_FAULTS: dict[str, Any] = {
    "hidden_states": torch.ones(TOKENS, HIDDEN, dtype=torch.int32),
    "w_ptr_a": torch.zeros(2, EXPERTS, dtype=torch.int64),
    "w_ptr_b": torch.zeros(EXPERTS, dtype=torch.int64),
    "lora_stride_a": 3,
    "lora_stride_b": -1,
    "topk_ids": torch.ones(TOKENS, TOP_K),
    "lora_ids": torch.ones(TOKENS + 1, dtype=torch.int32),
    "rank": RANK + 8,
    "intermediate_size": INTERMEDIATE - 8,
    "lora_dtype": torch.float16,
    "scale": "2",
    "out_dtype": torch.int8,
}


@pytest.mark.parametrize("name", FIRST_FAULTS)
def test_what_is_wrong_is_refused_by_name(device: torch.device, name: str) -> None:
    parts = first_call(device, False, BF16)
    (a, stride_a), (b, stride_b) = table_of(parts["first"]), table_of(parts["second"])
    chosen, own = choices(device)
    call = {
        "hidden_states": parts["x"],
        "w_ptr_a": a,
        "lora_stride_a": stride_a,
        "w_ptr_b": b,
        "lora_stride_b": stride_b,
        "topk_ids": chosen,
        "lora_ids": own,
        "rank": RANK,
        "intermediate_size": INTERMEDIATE,
    }
    # The second table stands for weights of another size than the caller says.
    named = "w_ptr_b" if name == "intermediate_size" else name
    with pytest.raises((TypeError, ValueError), match=f"`{named}`"):
        bgmv_moe_gemm1_lora_delta(**{**call, name: FIRST_FAULTS[name]})


SECOND_FAULTS: dict[str, Any] = {
    "gemm1_activation_output": torch.ones(4, INTERMEDIATE + 8),
    "expanded_idx_to_permuted_idx": torch.zeros(TOKENS, dtype=torch.int32),
    "topk_weights": torch.ones(TOKENS),
    "hidden_size": 0,
    "scale": float("nan"),
    "lora_dtype": torch.float32,
}


@pytest.mark.parametrize("name", SECOND_FAULTS)
def test_what_is_wrong_of_results_is_refused_by_name(device: torch.device, name: str) -> None:
    first, second = weights(RANK, INTERMEDIATE, device=device), weights(HIDDEN, RANK, device=device)
    (a, stride_a), (b, stride_b) = table_of([first]), table_of([second])
    chosen, own = choices(device)
    call = {
        "gemm1_activation_output": torch.ones(4, INTERMEDIATE, device=device),
        "expanded_idx_to_permuted_idx": torch.zeros(TOKENS * TOP_K, device=device).int(),
        "w_ptr_a": a,
        "lora_stride_a": stride_a,
        "w_ptr_b": b,
        "lora_stride_b": stride_b,
        "topk_ids": chosen,
        "topk_weights": torch.ones(TOKENS, TOP_K, device=device),
        "lora_ids": own,
        "rank": RANK,
        "hidden_size": HIDDEN,
    }
    with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
        bgmv_moe_gemm2_lora_delta(**{**call, name: SECOND_FAULTS[name]})
