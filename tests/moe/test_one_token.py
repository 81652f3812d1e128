"""One token with weights of 16 bits, whose experts have kernels of their own."""

from __future__ import annotations

import pytest
import torch

from flashinfer._moe import one_token
from flashinfer._moe.experts import Experts

BF16 = torch.bfloat16
SHAPES = [  # experts, hidden, intermediate, choices: parts that end early, several rounds of a warp
    (128, 2048, 768, 8), (8, 4096, 1408, 2), (16, 2880, 2880, 4), (4, 64, 128, 2),
    (32, 1024, 8, 32), (5, 8, 264, 1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the kernels are built for it")
    return torch.device("cuda")


def make(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The token and both weights."""
    experts, hidden, inner, _ = shape
    fc1 = torch.randn(experts, 2 * inner, hidden, device="cuda") / hidden**0.5
    fc2 = torch.randn(experts, hidden, inner, device="cuda") / inner**0.5
    return torch.randn(1, hidden, device="cuda").to(dtype), fc1.to(dtype), fc2.to(dtype)


def expected(
    x: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, chosen: list[int], weights: list[float]
) -> torch.Tensor:
    out = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for expert, weight in zip(chosen, weights, strict=True):
        if 0 <= expert < len(fc1):
            value, gate = (fc1[expert].double() @ x[0].double()).chunk(2)
            hidden = (torch.nn.functional.silu(gate) * value).to(x.dtype).double()
            out += weight * (fc2[expert].double() @ hidden)
    return out


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_given_experts(
    shape: tuple[int, int, int, int], dtype: torch.dtype, index: torch.dtype
) -> None:
    """Some are elsewhere, some are chosen twice."""
    x, fc1, fc2 = make(shape, dtype)
    experts, _, _, top_k = shape
    chosen = torch.randint(-1, experts + 1, (1, top_k), device="cuda").to(index)
    weights = torch.randn(1, top_k, device="cuda")
    out = torch.full_like(x, float("nan"))
    assert one_token.takes(x, out, fc1, fc2, top_k)
    mixture = Experts(fc1, fc2, "swiglu_gate_last", first_expert=3)
    mixture.run(x, chosen + 3, weights, out)
    assert torch.equal(out, mixture.run(x, chosen + 3, weights, torch.empty_like(x)))
    target = expected(x, fc1, fc2, chosen[0].tolist(), weights[0].tolist())
    error = (out[0].double() - target).norm()
    assert not out.isnan().any() and float(error) <= 0.006 * float(target.norm())
