"""Products whose gated activation is rounded to 8 bits by the kernel that multiplies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer import gemm, norm

pytestmark = pytest.mark.usefixtures("hopper")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = [
    (1, 256, 128),
    (5, 512, 384),
    (16, 768, 2048),
    (37, 1280, 4096),
    (64, 28672, 512),
    (128, 512, 1024),
    (300, 1024, 640),
]  # m, n, k


def make(m: int, n: int, k: int, device: torch.device) -> dict[str, Any]:
    return {
        "input": torch.randn(m, k, device=device).to(E4M3),
        "weight": torch.randn(n, k, device=device).to(E4M3),
        "input_scale": torch.rand(m, k // 128, device=device) + 0.5,
        "weight_scale": (torch.rand(n // 128, k // 128, device=device) + 0.5) / k**0.5,
    }


def values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    spread = scale.double().repeat_interleave(128, 1)
    if scale.shape[0] != codes.shape[0]:
        spread = spread.repeat_interleave(128, 0)
    return codes.double() * spread


def assert_near(codes: torch.Tensor, scale: torch.Tensor, call: dict[str, Any]) -> None:
    """Within half a step of the codes, and the 14 bits in which the tensor cores sum."""
    left = values(call["input"], call["input_scale"])
    right = values(call["weight"], call["weight_scale"]).T
    gate, up = (left @ right).chunk(2, 1)
    off_gate, off_up = (2.0**-12 * (left.abs() @ right.abs())).chunk(2, 1)
    silu = torch.nn.functional.silu(gate)
    y = silu * up
    # silu's slope is at most 1.1.
    off = 1.1 * off_gate * (up.abs() + off_up) + silu.abs() * off_up + 1e-5 * y.abs()
    largest = [part.unflatten(1, (-1, 128)).amax(2) for part in (y.abs(), off)]
    assert bool(((scale.double() * 448 - largest[0]).abs() <= largest[1]).all())
    # Numbers are rounded to 11 bits on their way to 4.
    step = 0.0645 * y.abs() + 2.0**-9 * scale.double().repeat_interleave(128, 1)
    assert bool(((values(codes, scale) - y).abs() <= step + off).all())


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_activation_and_codes(
    shape: tuple[int, int, int], layout: str, device: torch.device
) -> None:
    m, n, k = shape
    call = make(m, n, k, device)
    if layout == "columns":
        call["input_scale"] = call["input_scale"].t().contiguous().t()
    out = torch.ones(m, n // 2, device=device).to(E4M3)
    out_scale = torch.full((m, n // 256), float("nan"), device=device)
    results = gemm.fp8_blockscale_gemm_swiglu_sm90(**call, out=out, out_scale=out_scale)
    assert results[0] is out and results[1] is out_scale
    assert_near(out, out_scale, call)
    again = gemm.fp8_blockscale_gemm_swiglu_sm90(**call, weight_ready=True)
    assert torch.equal(again[0].view(torch.uint8), out.view(torch.uint8))
    assert torch.equal(again[1], out_scale)


def test_between_a_norm_and_a_product(device: torch.device) -> None:
    """Each kernel begins before the one before ends, and reads what that one writes."""
    m, k, inner = 64, 1024, 2048
    call = make(m, 2 * inner, k, device)
    down = make(m, 768, inner, device)
    x, residual = (torch.randn(m, k, device=device).to(BF16) for _ in range(2))
    gain = torch.ones(k, device=device).to(BF16)
    given = [x.clone(), residual.clone()]
    call["input_scale"] = torch.empty(k // 128, m, device=device).t()
    codes = torch.ones(m, inner, device=device).to(E4M3)
    scale = torch.empty(m, inner // 128, device=device)
    out = torch.empty(m, 768, dtype=BF16, device=device)

    def run() -> None:
        x.copy_(given[0])
        residual.copy_(given[1])
        norm.fused_add_rmsnorm_fp8_block_quant(
            call["input"], call["input_scale"].t(), x, x, residual, gain
        )
        gemm.fp8_blockscale_gemm_swiglu_sm90(**call, out=codes, out_scale=scale, weight_ready=True)
        gemm.fp8_blockscale_gemm_sm90(
            codes, down["weight"], scale, down["weight_scale"], out, weight_ready=True
        )

    again: Callable[[], Any] = run
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        again = graph.replay
    for _ in range(3):
        for tensor in given:
            tensor.normal_()
        for tensor in (out, scale):
            tensor.fill_(float("nan"))
        again()
        assert_near(codes, scale, call)
        left, right = values(codes, scale), values(down["weight"], down["weight_scale"]).T
        bound = 2.0**-8 * (left @ right).abs() + 2.0**-12 * (left.abs() @ right.abs())
        assert bool(((out.double() - left @ right).abs() <= bound).all())


def test_no_rows(device: torch.device) -> None:
    codes, scale = gemm.fp8_blockscale_gemm_swiglu_sm90(**make(0, 512, 256, device))
    assert codes.shape == (0, 256) and scale.shape == (0, 2)


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "input": lambda call: call["input"].to(BF16),
    "weight": lambda call: call["weight"][:384],
    "input_scale": lambda call: call["input_scale"][:, :1],
    "weight_scale": lambda call: call["weight_scale"].half(),
    "out": lambda call: torch.empty_like(call["input"], dtype=BF16),
    "out_scale": lambda call: call["input_scale"][:, :1],
    "weight_ready": lambda call: 1,
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_refused_by_name(name: str, device: torch.device) -> None:
    call = make(4, 512, 256, device)
    call[name] = FAULTS[name](call)
    with pytest.raises((TypeError, ValueError), match=name):
        gemm.fp8_blockscale_gemm_swiglu_sm90(**call)
