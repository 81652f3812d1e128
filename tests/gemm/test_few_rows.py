"""Products of few rows with weights whose rows are contiguous, alone and with what follows."""

from __future__ import annotations

import pytest
import torch

from flashinfer import gemm, norm

BF16 = torch.bfloat16
SHAPES = [  # n, k: clusters of each size, parts that end early or have no rows, several waves
    (64, 16), (128, 2048), (5120, 2048), (192, 272), (6144, 4096), (4096, 14336), (28672, 4096),
]  # fmt: skip
NORMS = [(256, 16), (4096, 4096), (4096, 14336), (2304, 272)]


@pytest.fixture(autouse=True)
def _on_hopper(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU: the kernel is built for it")


def _rows(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns + 8, device=device).to(BF16)[:, :columns]


def _guarded(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.full((rows + 1, columns + 8), float("nan"), dtype=BF16, device=device)
    return whole, whole[:rows, :columns]


def _is_kept(whole: torch.Tensor, rows: int, columns: int) -> bool:
    return bool(whole[rows:].isnan().all() and whole[:, columns:].isnan().all())


def _near(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> bool:
    bound = torch.finfo(BF16).eps * expected.abs() + 2.0**-14 * magnitude
    return bool(((out.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("rows", [2, 7, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape: tuple[int, int], rows: int, device: torch.device) -> None:
    n, k = shape
    ready = rows % 2 == 1
    a, b = _rows(rows, k, device), _rows(k, n, device)
    bias = torch.randn(n, device=device).to(BF16) if ready else None
    whole, out = _guarded(rows, n, device)
    gemm.mm_bf16(a, b, bias, pdl=ready, out=out, weight_ready=ready)
    expected, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert _near(out, expected if bias is None else expected + bias.double(), magnitude)
    assert _is_kept(whole, rows, n)
    assert torch.equal(out, gemm.mm_bf16(a, b, bias, pdl=ready, weight_ready=ready))


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("shape", [(128, 16), (384, 272), (28672, 4096)], ids=str)
def test_gated(shape: tuple[int, int], rows: int, device: torch.device) -> None:
    n, k = shape
    a, b = _rows(rows, k, device), _rows(k, n, device) * k**-0.5
    whole, out = _guarded(rows, n // 2, device)
    assert gemm.mm_silu_and_mul_bf16(a, b, out, weight_ready=rows == 5) is out
    gate, up = (a.double() @ b.double()).chunk(2, dim=1)
    size, other = (a.double().abs() @ b.double().abs()).chunk(2, dim=1)
    assert _near(out, gate * gate.sigmoid() * up, (size + 1) * (other + 1))
    assert _is_kept(whole, rows, n // 2)
    assert torch.equal(out, gemm.mm_silu_and_mul_bf16(a, b, enable_pdl=False))


@pytest.mark.parametrize("rows", [1, 6, 8])
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_norm(shape: tuple[int, int], rows: int, device: torch.device) -> None:
    n, k = shape
    a, b, residual = _rows(rows, k, device), _rows(k, n, device), _rows(rows, n, device)
    weight = torch.randn(n, device=device).to(BF16)
    whole, out = _guarded(rows, n, device)
    guard, total = _guarded(rows, n, device)
    total.copy_(residual)
    got = gemm.mm_add_rmsnorm_bf16(a, b, total, weight, 1e-3, out, weight_ready=rows == 6)
    assert got is out
    expected = a.double() @ b.double() + residual.double()
    magnitude = a.double().abs() @ b.double().abs() + residual.double().abs()
    assert _near(total, expected, magnitude)
    factor = (expected.square().mean(1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    assert _near(out, expected * factor, magnitude * factor.abs())
    assert _is_kept(whole, rows, n) and _is_kept(guard, rows, n)
    again = gemm.mm_add_rmsnorm_bf16(a, b, residual, weight, 1e-3, enable_pdl=False)
    assert torch.equal(out, again) and torch.equal(total, residual)


def test_rows_do_not_depend_on_each_other(device: torch.device) -> None:
    a, b = _rows(8, 4096, device), _rows(4096, 512, device)
    expected = gemm.mm_bf16(a, b)
    assert torch.equal(gemm.mm_bf16(a[:3], b), expected[:3])
    a[5] = float("nan")
    others = [row for row in range(8) if row != 5]
    assert torch.equal(gemm.mm_bf16(a, b)[others], expected[others])


def test_infinite_weights_stay_where_they_are(device: torch.device) -> None:
    a, b = torch.ones(3, 32, device=device).to(BF16), torch.ones(32, 64, device=device).to(BF16)
    b[23, 3] = float("inf")
    expected = torch.full((3, 64), 32.0, device=device)
    expected[:, 3] = float("inf")
    assert torch.equal(gemm.mm_bf16(a, b).float(), expected)


@pytest.mark.parametrize("rows", [1, 8])
def test_reads_what_the_kernel_before_wrote(rows: int, device: torch.device) -> None:
    """Weights may be loaded before another kernel ends, but not its result: a layer in a graph."""
    hidden, inner = 1024, 2048
    x = torch.empty(rows, hidden, device=device, dtype=BF16)
    shapes = (hidden, 2 * inner), (inner, hidden), (hidden, hidden)
    up, down, other = (_rows(*shape, device) * shape[0] ** -0.5 for shape in shapes)
    gain = torch.rand(hidden, device=device).to(BF16)

    def layer(early: bool) -> tuple[torch.Tensor, torch.Tensor]:
        flags = {"enable_pdl": early, "weight_ready": early}
        residual, y = x.clone(), norm.rmsnorm(x, gain, enable_pdl=early)
        for _ in range(4):
            inside = gemm.mm_silu_and_mul_bf16(y, up, **flags)
            y = gemm.mm_add_rmsnorm_bf16(inside, down, residual, gain, **flags)
            y = gemm.mm_bf16(y, other, pdl=early, weight_ready=early)
        return y, residual

    x.normal_()
    layer(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layer(True)
    for _ in range(5):
        x.normal_()
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, results, layer(False)))


def test_others_are_refused(device: torch.device) -> None:
    a, b = torch.ones(2, 16, device=device).to(BF16), torch.ones(16, 256, device=device).to(BF16)
    total, weight = torch.ones(2, 256, device=device).to(BF16), b[0]
    with pytest.raises(ValueError, match="`b` must have rows of whole, aligned 16 bytes"):
        gemm.mm_bf16(a, b[:, :12])
    with pytest.raises(ValueError, match="`b` must have a multiple of 16 rows and of 64 columns"):
        gemm.mm_bf16(a, b[:, :72])
    with pytest.raises(ValueError, match="`b` must have shape"):
        gemm.mm_bf16(a[:, :8], b)
    nine = torch.ones(9, 16, device=device).to(BF16)
    with pytest.raises(ValueError, match="`b`"):
        gemm.mm_bf16(nine, b)
    with pytest.raises(ValueError, match="`a` must have 1 to 8 rows"):
        gemm.mm_silu_and_mul_bf16(nine, b)
    with pytest.raises(ValueError, match="`b` must have a multiple of 128 columns"):
        gemm.mm_silu_and_mul_bf16(a, b[:, :64])
    with pytest.raises(ValueError, match="`b` must have a multiple of 256 columns with a norm"):
        gemm.mm_add_rmsnorm_bf16(a, b[:, :128], total[:, :128], weight[:128])
    with pytest.raises(ValueError, match="`out` must not share memory with `residual`"):
        gemm.mm_add_rmsnorm_bf16(a, b, total, weight, out=total)
