"""Products of one row that a norm makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import gemm

BF16 = torch.bfloat16
SHAPES = [
    (8, 8),
    (128, 2048),
    (5120, 2048),
    (72, 264),
    (6144, 4096),
    (40000, 512),
    (136, 1000),
]  # n, k


@pytest.fixture(autouse=True)
def _on_hopper(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU: the kernel is built for it")


def make(n: int, k: int, device: torch.device) -> dict[str, Any]:
    return {
        "input": torch.randn(1, k, device=device).to(BF16),
        "residual": torch.randn(1, k, device=device).to(BF16),
        "norm_weight": torch.rand(k, device=device).to(BF16),
        "b": torch.randn(k, n + 8, device=device).to(BF16)[:, :n],
    }


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_product(shape: tuple[int, int], ready: bool, device: torch.device) -> None:
    n, k = shape
    call = make(n, k, device)
    if ready:
        call["bias"] = torch.randn(n, device=device).to(BF16)
    sizes = {"out": n, "residual_out": k, "normed_out": k}
    outs = {
        name: torch.full((1, size), float("nan"), dtype=BF16, device=device)
        for name, size in sizes.items()
    }
    results = gemm.add_rmsnorm_mm_bf16(**call, eps=1e-3, weight_ready=ready, **outs)
    assert all(a is b for a, b in zip(results, outs.values(), strict=True))
    again = gemm.add_rmsnorm_mm_bf16(**call, eps=1e-3, enable_pdl=False)
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))

    out, total, normed = results
    x, residual = call["input"].clone(), call["residual"].clone()
    flashinfer.fused_add_rmsnorm(x, residual, call["norm_weight"], 1e-3)
    assert torch.equal(total, residual)
    # Squares are added in another order.
    near = torch.finfo(BF16).eps * x.abs().float()
    assert bool(((normed.float() - x.float()).abs() <= near).all())
    # Large weights have another kernel then, which adds in another order.
    plain = gemm.mm_bf16(normed, call["b"], call.get("bias")).float()
    size = normed.double().abs() @ call["b"].double().abs()
    bound = 2 * torch.finfo(BF16).eps * plain.abs() + 2.0**-13 * size
    assert bool(((out.float() - plain).abs() <= bound).all())


def test_layers_that_hand_each_other_residuals(device: torch.device) -> None:
    """Each kernel begins before the one before ends, and reads what that one writes."""
    call = make(2048, 2048, device)
    x, residual = call.pop("input"), call.pop("residual")

    def run() -> list[torch.Tensor]:
        row, total, rows = x, residual, []
        for _ in range(6):
            row, total, _ = gemm.add_rmsnorm_mm_bf16(row, total, **call, weight_ready=True)
            rows += [row, total]
        return rows

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(5):
        x.normal_()
        expected = []
        row, total = x, residual
        for _ in range(6):
            row, total, _ = gemm.add_rmsnorm_mm_bf16(row, total, **call, enable_pdl=False)
            torch.cuda.synchronize()
            expected += [row, total]
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "input": lambda call: call["input"].repeat(2, 1),
    "residual": lambda call: call["residual"][:, :-8],
    "norm_weight": lambda call: call["norm_weight"].float(),
    "b": lambda call: call["b"][:, :12],
    "bias": lambda call: call["norm_weight"],
    "eps": lambda call: -1e-6,
    "out": lambda call: call["input"],
    "residual_out": lambda call: call["residual"],
    "normed_out": lambda call: call["input"],
    "enable_pdl": lambda call: 1,
    "weight_ready": lambda call: 1,
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_refused_by_name(name: str, device: torch.device) -> None:
    call = make(64, 256, device)
    call[name] = FAULTS[name](call)
    with pytest.raises((TypeError, ValueError), match=name):
        gemm.add_rmsnorm_mm_bf16(**call)
