"""Products of one row with weights whose rows are contiguous."""

from __future__ import annotations

import pytest
import torch

from flashinfer import gemm, norm

BF16 = torch.bfloat16
SHAPES = [  # n, k: tiles and parts that end early, clusters of each size, several waves
    (8, 8), (128, 2048), (5120, 2048), (2048, 4096), (72, 264), (6144, 4096), (4096, 14336),
    (28672, 4096), (40000, 512), (64, 16), (136, 1000),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _on_hopper(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU: the kernel is built for it")


def _near(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    expected, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        expected += bias.double()
    bound = torch.finfo(BF16).eps * expected.abs() + 2.0**-14 * magnitude
    return bool(((out.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape: tuple[int, int], ready: bool, device: torch.device) -> None:
    n, k = shape
    a = torch.randn(1, k, device=device).to(BF16)
    b = torch.randn(k, n + 8, device=device).to(BF16)[:, :n]
    bias = torch.randn(n, device=device).to(BF16) if ready else None
    out = torch.full((1, n), float("nan"), dtype=BF16, device=device)
    gemm.mm_bf16(a, b, bias, pdl=ready, out=out, weight_ready=ready)
    assert _near(out, a, b, bias)
    assert torch.equal(out, gemm.mm_bf16(a, b, bias, pdl=ready, weight_ready=ready))


def test_infinite_weights_stay_where_they_are(device: torch.device) -> None:
    a, b = torch.ones(1, 24, device=device).to(BF16), torch.ones(24, 64, device=device).to(BF16)
    b[23, 3] = float("inf")
    expected = torch.full((1, 64), 24.0, device=device)
    expected[:, 3] = float("inf")
    assert torch.equal(gemm.mm_bf16(a, b).float(), expected)


def test_reads_what_the_kernel_before_wrote(device: torch.device) -> None:
    """Weights may be loaded before a norm ends, but not its result."""
    x = torch.randn(1, 4096, device=device).to(BF16)
    b, gain = torch.randn(4096, 4096, device=device).to(BF16), torch.rand(4096, device=device)
    gain = gain.to(BF16)
    outs = [torch.empty_like(x) for _ in range(3)]

    def run() -> None:
        norm.rmsnorm(x, gain, out=outs[0])
        gemm.mm_bf16(outs[0], b, pdl=True, out=outs[1], weight_ready=True)
        norm.rmsnorm(outs[1], gain, out=outs[2])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            run()
    for _ in range(5):
        x.normal_()
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert _near(outs[1], outs[0], b, None)
        assert torch.equal(outs[2], norm.rmsnorm(outs[1], gain))


def test_other_rows_are_refused(device: torch.device) -> None:
    a, b = torch.ones(1, 16, device=device).to(BF16), torch.ones(16, 24, device=device).to(BF16)
    with pytest.raises(ValueError, match="`b` must have rows of whole, aligned 16 bytes"):
        gemm.mm_bf16(a, b[:, :12])
    with pytest.raises(ValueError, match="`b` must have shape"):
        gemm.mm_bf16(a[:, :8], b)
    with pytest.raises(TypeError, match="`weight_ready` must be a bool"):
        gemm.mm_bf16(a, b, weight_ready=1)  # type: ignore[arg-type]
