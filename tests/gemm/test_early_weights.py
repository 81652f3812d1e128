"""Products that load their weights while the kernel that writes their other operand still runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashinfer import gemm, norm, quantization

pytestmark = pytest.mark.usefixtures("hopper")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = [(1, 128, 256), (3, 640, 1024), (8, 4096, 512), (33, 264, 1024), (64, 1024, 4096)]


def _near(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> bool:
    bound = torch.finfo(out.dtype).eps * expected.abs() + 2.0**-12 * magnitude
    return bool(((out.double() - expected).abs() <= bound).all())


def _repeated(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A graph of `run` on a GPU, where kernels follow each other without the host."""
    run()
    if device.type != "cuda":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_after_a_norm(shape: tuple[int, int, int], device: torch.device) -> None:
    """The product reads what the norm wrote in the same replay, not before."""
    m, n, k = shape
    given = [torch.randn(m, k, device=device).to(BF16) for _ in range(2)]
    weight, gain = torch.randn(n, k, device=device).to(BF16), torch.rand(k, device=device).to(BF16)
    x, residual = (tensor.clone() for tensor in given)
    out = torch.empty(m, n, dtype=BF16, device=device)

    def run() -> None:
        x.copy_(given[0])
        residual.copy_(given[1])
        norm.fused_add_rmsnorm(x, residual, gain, 1e-6)
        gemm.tinygemm_bf16(x, weight, out, use_pdl=True)

    again = _repeated(run, device)
    for _ in range(3):
        for tensor in given:
            tensor.normal_()
        out.fill_(float("nan"))
        again()
        left, right = x.double(), weight.double().t()
        assert _near(out, left @ right, left.abs() @ right.abs())


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_codes_after_what_rounds(shape: tuple[int, int, int], device: torch.device) -> None:
    m, n, k = shape
    n -= n % 16
    x = torch.randn(m, 2 * k, device=device).to(BF16)
    weight = torch.randn(n, k, device=device).to(E4M3)
    scale = torch.rand(-(-n // 128), k // 128, device=device)
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    out = torch.empty(m, n, dtype=BF16, device=device)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run() -> None:
        codes, scales = quantization.silu_and_mul_per_token_group_quant_8bit(
            x, 128, column_major_scales=True
        )
        seen[:] = [(codes, scales)]
        gemm.fp8_blockscale_gemm_sm90(codes, weight, scales, scale, out, weight_ready=True)

    again = _repeated(run, device)
    for _ in range(3):
        x.normal_()
        out.fill_(float("nan"))
        again()
        codes, scales = seen[0]
        left = codes.double() * scales.double().repeat_interleave(128, 1)
        right = (weight.double() * spread.double()).t()
        assert _near(out, left @ right, left.abs() @ right.abs())


@pytest.mark.parametrize("weights", ["ready", "older", "new"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_rows_that_the_call_rounds(
    shape: tuple[int, int, int], weights: str, device: torch.device
) -> None:
    """Rows of the same replay; and weights, where it writes them and they are not called ready."""
    m, n, k = shape
    n -= n % 16
    given = torch.randn(m, k, device=device).to(BF16)
    made = torch.randn(n, k, device=device).to(BF16)
    x = torch.empty_like(given)
    seen = list(quantization.per_token_group_quant_8bit(made, 128))
    out = torch.empty(m, n, dtype=BF16, device=device)

    def run() -> None:
        if weights == "new":
            left = given
            seen[:] = quantization.per_token_group_quant_8bit(made, 128)
        else:
            left = x.copy_(given)
        codes, scale = seen
        ready = weights == "ready"
        gemm.fp8_blockscale_gemm_sm90(left, codes, weight_scale=scale, out=out, weight_ready=ready)

    again = _repeated(run, device)
    for _ in range(3):
        given.normal_()
        made.normal_()
        out.fill_(float("nan"))
        again()
        rounded, scales = quantization.per_token_group_quant_8bit(given, 128)
        left = rounded.double() * scales.double().repeat_interleave(128, 1)
        right = (seen[0].double() * seen[1].double().repeat_interleave(128, 1)).t()
        assert _near(out, left @ right, left.abs() @ right.abs())


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_switch_is_a_bool(value: object, device: torch.device) -> None:
    x = torch.zeros(4, 128, dtype=BF16, device=device)
    weight = torch.zeros(16, 128, device=device).to(E4M3)
    scale = torch.ones(1, 1, device=device)
    with pytest.raises(TypeError, match="`weight_ready` must be a bool"):
        gemm.fp8_blockscale_gemm_sm90(x, weight, weight_scale=scale, weight_ready=value)  # type: ignore[arg-type]
