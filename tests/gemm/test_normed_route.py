"""Experts of a row that a norm makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer import gemm

BF16 = torch.bfloat16
SHAPES = [(128, 2048, 8), (128, 4096, 8), (8, 8, 1), (64, 1024, 4), (32, 2880, 32), (72, 264, 6)]


@pytest.fixture(autouse=True)
def _on_hopper(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU: the kernel is built for it")


def make(experts: int, k: int, top_k: int, device: torch.device) -> dict[str, Any]:
    return {
        "input": torch.randn(1, k, device=device).to(BF16),
        "residual": torch.randn(1, k, device=device).to(BF16),
        "norm_weight": torch.rand(k, device=device).to(BF16),
        "b": (torch.randn(k, experts + 8, device=device) / k**0.5).to(BF16)[:, :experts],
        "top_k": top_k,
    }


def best(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """The experts with the largest logits, of equal ones the first."""
    return torch.argsort(logits.float(), dim=-1, descending=True, stable=True)[:, :top_k].int()


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choice(
    shape: tuple[int, int, int], renormalize: bool, ready: bool, device: torch.device
) -> None:
    experts, _, top_k = shape
    call = make(*shape, device) | {"renormalize": renormalize, "weight_ready": ready}
    if ready:
        call["bias"] = torch.randn(experts, device=device).to(BF16)
    results = gemm.add_rmsnorm_mm_route_bf16(**call, routed_scaling_factor=1.5)
    again = gemm.add_rmsnorm_mm_route_bf16(**call, routed_scaling_factor=1.5, enable_pdl=False)
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    weights, numbers, logits, total, normed = results
    plain = {name: call[name] for name in ("input", "residual", "norm_weight", "b")}
    _, right_total, right_normed = gemm.add_rmsnorm_mm_bf16(**plain, bias=call.get("bias"))
    assert torch.equal(total, right_total) and torch.equal(normed, right_normed)
    product = normed.double() @ call["b"].double()
    if ready:
        product += call["bias"].double()
    bound = torch.finfo(BF16).eps * product.abs() + 1e-3
    assert bool(((logits.double() - product).abs() <= bound).all())
    assert torch.equal(numbers, best(logits, top_k))
    shares = logits.double().softmax(-1).gather(1, numbers.long())
    right = 1.5 * (shares / shares.sum(-1, keepdim=True) if renormalize else shares)
    torch.testing.assert_close(weights.double(), right, rtol=1e-5, atol=1e-7)


def test_equal_logits_and_nan(device: torch.device) -> None:
    call = make(128, 512, 8, device)
    call["b"] = torch.zeros_like(call["b"]).contiguous()
    weights, numbers, *_ = gemm.add_rmsnorm_mm_route_bf16(**call)
    assert numbers.tolist() == [list(range(8))]
    assert torch.allclose(weights, torch.full_like(weights, 0.125))
    call["b"][:, 77] = float("nan")
    weights, numbers, *_ = gemm.add_rmsnorm_mm_route_bf16(**call)
    assert numbers[0, 0] == 77 and bool(weights.isnan().all())


def test_layers_that_begin_early(device: torch.device) -> None:
    """Each kernel begins before the one before ends, and reads what that one writes."""
    call = make(128, 2048, 8, device)
    x, residual = call.pop("input"), call.pop("residual")

    def run(**options: Any) -> list[torch.Tensor]:
        row, total, rows = x, residual, []
        for _ in range(6):
            made = gemm.add_rmsnorm_mm_route_bf16(row, total, **call, **options)
            row, total = made[4], made[3]
            rows += made
        return rows

    run(weight_ready=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(weight_ready=True)
    for _ in range(5):
        x.normal_()
        right = run(enable_pdl=False)
        for tensor in captured:
            tensor.fill_(-1)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, right, strict=True))


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "input": lambda call: call["input"].repeat(2, 1),
    "residual": lambda call: call["residual"][:, :-8],
    "norm_weight": lambda call: call["norm_weight"].float(),
    "b": lambda call: call["b"][:, :12],
    "top_k": lambda call: 33,
    "bias": lambda call: call["norm_weight"],
    "eps": lambda call: -1e-6,
    "renormalize": lambda call: 1,
    "routed_scaling_factor": lambda call: 0.0,
    "residual_out": lambda call: call["residual"],
    "normed_out": lambda call: call["input"],
    "enable_pdl": lambda call: 1,
    "weight_ready": lambda call: 1,
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_refused_by_name(name: str, device: torch.device) -> None:
    call = make(64, 256, 8, device)
    call[name] = FAULTS[name](call)
    with pytest.raises((TypeError, ValueError), match=name):
        gemm.add_rmsnorm_mm_route_bf16(**call)
