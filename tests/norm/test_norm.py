"""Norms against expectations written here, independently of the references in flashinfer/trace.

They run on the GPU, and on a machine without one under the reference backend.
"""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.testing import compare, error_bound, make_tensor, poisoned_like

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)

# Per-head rows, a lone row, whole warps and parts of them, several vectors per thread, CTAs that
# loop, rows that clusters hold, rows that nothing holds, rows of no whole number of vectors, and
# many rows that the copy engine brings, of which the reference needs fewer.
MANY = (3000, 1200) if torch.cuda.is_available() else (30, 12)
SHAPES = [
    *[(1, 1), (3, 7), (1, 4096), (5, 96), (130, 128), (33, 1000), (7, 8192), (9, 8192), (3, 16392)],
    *[(2, 40000), (1, 131072), (2, 140000), (2, 33001), (MANY[0], 1024), (MANY[1], 4104)],
]
SHAPES_3D = [(1, 1, 64), (5, 32, 128), (3, 7, 80)]


def expect_rms(x, weight, eps, offset=0.0):
    x = x.double()
    root = torch.sqrt((x * x).sum(dim=-1, keepdim=True) / x.shape[-1] + eps)
    return x / root * (weight.double() + offset)


def expect_layer(x, gemma, beta, eps):
    x = x.double()
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gemma.double(), beta.double(), eps)


def expect_quant(y, scale, dtype):
    limit = torch.finfo(dtype).max
    return torch.clamp(y / float(scale), -limit, limit)


def check(actual, expected, length, dtype=None, **bound):
    result = compare(actual, expected, bound=error_bound(dtype or actual.dtype, length, **bound))
    assert result, str(result)


def new(device, *shape, dtype=torch.bfloat16, **layout):
    return make_tensor(*shape, dtype=dtype, device=device, **layout)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES + SHAPES_3D, ids=str)
@pytest.mark.parametrize("gemma", [False, True], ids=["rmsnorm", "gemma_rmsnorm"])
def test_rmsnorm(device, gemma, shape, dtype):
    x, w = new(device, *shape, dtype=dtype), new(device, shape[-1], dtype=dtype)
    out = poisoned_like(x)
    api = flashinfer.gemma_rmsnorm if gemma else flashinfer.rmsnorm
    assert api(x, w, eps=1e-5, out=out) is out
    check(out, expect_rms(x, w, 1e-5, float(gemma)), shape[-1])
    assert torch.equal(api(x, w, 1e-5), out)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES + SHAPES_3D, ids=str)
@pytest.mark.parametrize("gemma", [False, True], ids=["rmsnorm", "gemma_rmsnorm"])
def test_fused_add_rmsnorm(device, gemma, shape, dtype):
    x, r = new(device, *shape, dtype=dtype), new(device, *shape, dtype=dtype, std=4.0)
    w = new(device, shape[-1], dtype=dtype)
    total = x.double() + r.double()
    api = flashinfer.gemma_fused_add_rmsnorm if gemma else flashinfer.fused_add_rmsnorm
    assert api(x, r, w) is None
    check(r, total, 1)
    check(x, expect_rms(total, w, 1e-6, float(gemma)), shape[-1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES + SHAPES_3D, ids=str)
def test_layernorm(device, shape, dtype):
    # A mean far from zero: a variance formed as E[x^2] - E[x]^2 would be lost.
    x = new(device, *shape, dtype=dtype, mean=30.0)
    gemma, beta = (new(device, shape[-1], dtype=torch.float32) for _ in range(2))
    out = flashinfer.layernorm(x, gemma, beta, eps=1e-5)
    assert out.dtype == dtype and out.shape == x.shape
    if shape[-1] == 1:
        check(out, expect_layer(x, gemma, beta, 1e-5), 1)
        return
    # The mean's rounding error is that of a value of 30, against a spread of 1.
    magnitude = float(30 * gemma.abs().max() + beta.abs().max())
    check(out, expect_layer(x, gemma, beta, 1e-5), shape[-1], magnitude=magnitude)


@pytest.mark.parametrize("scale_kind", ["float", "tensor"])
@pytest.mark.parametrize("out_dtype", FLOAT8S, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 4096), (33, 1000), (7, 8192), (3, 33001), (5, 4, 128)], ids=str
)
@pytest.mark.parametrize("op", ["rms", "add_rms", "layer"])
def test_quant(device, op, shape, dtype, out_dtype, scale_kind):
    x, r = new(device, *shape, dtype=dtype), new(device, *shape, dtype=dtype)
    w = new(device, shape[-1], dtype=torch.float32 if op == "layer" else dtype)
    beta = new(device, shape[-1], dtype=torch.float32)
    scale = 0.037 if scale_kind == "float" else torch.tensor([0.037], device=device)
    out = poisoned_like(torch.empty_like(x, dtype=out_dtype))
    before = x.clone()
    if op == "rms":
        assert flashinfer.rmsnorm_quant(out, x, w, scale) is None
        y = expect_rms(x, w, 1e-6)
    elif op == "add_rms":
        total = x.double() + r.double()
        assert flashinfer.fused_add_rmsnorm_quant(out, x, r, w, scale) is None
        check(r, total, 1)
        y = expect_rms(total, w, 1e-6)
    else:
        assert flashinfer.layernorm_quant(out, x, w, beta, scale) is None
        y = expect_layer(x, w, beta, 1e-6)
    assert torch.equal(x, before)
    check(out, expect_quant(y, 0.037, out_dtype), shape[-1])


@pytest.mark.parametrize("out_dtype", FLOAT8S, ids=str)
def test_quant_saturates(device, out_dtype):
    x = new(device, 4, 512)
    w = torch.full((512,), 3.0e4, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x, dtype=out_dtype)
    flashinfer.rmsnorm_quant(out, x, w, 1e-9)
    limit = torch.finfo(out_dtype).max
    assert torch.equal(out.float(), torch.sign(x.float()) * limit)


def test_quant_codes_are_nearest(device):
    """One-hot rows give exact float32 values: each code must be the nearest, ties to even."""
    values = torch.linspace(-500, 500, 4096, device=device).to(torch.bfloat16)
    x = torch.ones(1, 4096, dtype=torch.bfloat16, device=device)
    out = torch.empty(1, 4096, dtype=torch.float8_e4m3fn, device=device)
    flashinfer.rmsnorm_quant(out, x, values, 1.0, eps=0.0)
    expected = values.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out[0].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("gap,offset", [(8, 0), (3, 0), (64, 8), (0, 1)], ids=str)
@pytest.mark.parametrize("hidden", [128, 4096, 999])
def test_strided_and_misaligned_rows(device, hidden, gap, offset):
    layout = dict(row_stride=hidden + gap, storage_offset=offset)
    x, r = (new(device, 9, hidden, **layout) for _ in range(2))
    w = new(device, hidden, storage_offset=offset)
    out = poisoned_like(x)
    flashinfer.rmsnorm(x, w, out=out)
    check(out, expect_rms(x, w, 1e-6), hidden)
    total = x.double() + r.double()
    flashinfer.fused_add_rmsnorm(x, r, w)
    check(r, total, 1)
    check(x, expect_rms(total, w, 1e-6), hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["rms", "add_rms", "layer"])
def test_many_rows(device, op):
    """So many that rows are brought to L2 before their turn; some of them are compared."""
    rows, hidden = 13_000, 4104
    x, r = (new(device, rows, hidden, row_stride=hidden + 8) for _ in range(2))
    w = new(device, hidden, dtype=torch.float32 if op == "layer" else torch.bfloat16)
    some = torch.tensor([0, 1, 254, 255, 256, 6500, rows - 256, rows - 1], device=device)
    total = x[some].double()
    if op == "layer":
        out = flashinfer.layernorm(x, w, w, 1e-6)
        magnitude = float(4 * w.abs().max())
        check(out[some], expect_layer(total, w, w, 1e-6), hidden, magnitude=magnitude)
        return
    if op == "rms":
        out = flashinfer.rmsnorm(x, w)
    else:
        total += r[some].double()
        flashinfer.fused_add_rmsnorm(x, r, w)
        check(r[some], total, 1)
        out = x
    check(out[some], expect_rms(total, w, 1e-6), hidden)


def test_heads_of_a_fused_qkv(device):
    """The key heads of a packed projection: batch and head dimensions that do not fold."""
    qkv = new(device, 6, 48, 128)
    keys, w = qkv[:, 32:40], new(device, 128)
    before = qkv.clone()
    expected = expect_rms(keys, w, 1e-6)
    assert flashinfer.rmsnorm(keys, w, out=keys) is keys
    check(keys, expected, 128)
    assert torch.equal(qkv[:, :32], before[:, :32]) and torch.equal(qkv[:, 40:], before[:, 40:])
    transposed = new(device, 4, 6, 128).transpose(0, 1)
    check(flashinfer.rmsnorm(transposed, w), expect_rms(transposed, w, 1e-6), 128)


def test_in_place(device):
    x, w = new(device, 17, 8192), new(device, 8192)
    expected = flashinfer.rmsnorm(x, w)
    assert flashinfer.rmsnorm(x, w, out=x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("shape", [(0, 4096), (0, 8, 128), (4, 0, 128), (3, 0)], ids=str)
def test_empty(device, shape):
    x, w = new(device, *shape), new(device, shape[-1])
    assert flashinfer.rmsnorm(x, w).shape == shape
    flashinfer.fused_add_rmsnorm(x, x.clone(), w)


def test_a_bad_row_stays_alone(device):
    x, w = new(device, 6, 4096), new(device, 4096)
    expected = flashinfer.rmsnorm(x, w)
    x[2, 17], x[4, 5] = float("nan"), float("inf")
    out = flashinfer.rmsnorm(x, w)
    assert out[2].isnan().all()
    for row in (0, 1, 3, 5):
        assert torch.equal(out[row], expected[row])


def test_eps_counts(device):
    x, w = new(device, 4, 256, std=1e-3), torch.ones(256, dtype=torch.bfloat16, device=device)
    for eps in (0.0, 1e-6, 1.0):
        check(flashinfer.rmsnorm(x, w, eps), expect_rms(x, w, eps), 256)


@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_pdl_changes_no_bit(device, rows):
    x, w = new(device, rows, 8192), new(device, 8192)
    expected = flashinfer.rmsnorm(x, w, enable_pdl=False)
    for _ in range(20 if device.type == "cuda" else 1):
        y = flashinfer.rmsnorm(x, w)
        chained = flashinfer.rmsnorm(y, w)
    assert torch.equal(y, expected)
    assert torch.equal(chained, flashinfer.rmsnorm(expected, w, enable_pdl=False))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 1024, 3000])
def test_a_grid_reads_what_the_one_ahead_wrote(device, rows):
    """Rows that a grid brings to L2 before the grid ahead has ended are not those it had before."""
    w = new(device, 8192)
    start = new(device, rows, 8192), new(device, rows, 8192)
    operands = [[t.clone() for t in start] for _ in range(2)]
    for (x, residual), enable_pdl in zip(operands, (True, False), strict=True):
        for _ in range(20):
            flashinfer.fused_add_rmsnorm(x, residual, w, enable_pdl=enable_pdl)
            flashinfer.rmsnorm(x, w, out=x, enable_pdl=enable_pdl)
    for chained, apart in zip(*operands, strict=True):
        assert torch.equal(chained, apart)


@pytest.mark.gpu
def test_repeats_bit_for_bit(device):
    x, w = new(device, 1000, 8192), new(device, 8192)
    first = flashinfer.rmsnorm(x, w)
    assert all(torch.equal(flashinfer.rmsnorm(x, w), first) for _ in range(100))


@pytest.mark.gpu
def test_other_stream_and_graph(device):
    x, w, out = new(device, 64, 4096), new(device, 4096), new(device, 64, 4096)
    flashinfer.rmsnorm(x, w)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        x.mul_(2)
        flashinfer.rmsnorm(x, w, out=out)
    side.synchronize()
    check(out, expect_rms(x, w, 1e-6), 4096)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            flashinfer.fused_add_rmsnorm(x, out, w)
    x_start, out_start = new(device, 64, 4096), new(device, 64, 4096)
    x.copy_(x_start), out.copy_(out_start)
    graph.replay()
    for _ in range(4):
        flashinfer.fused_add_rmsnorm(x_start, out_start, w)
    assert torch.equal(x, x_start) and torch.equal(out, out_start)


@pytest.mark.gpu
def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, w = new("cuda:1", 4, 4096), new("cuda:1", 4096)
    with torch.cuda.device(0):
        out = flashinfer.rmsnorm(x, w)
        assert torch.cuda.current_device() == 0
    check(out, expect_rms(x, w, 1e-6), 4096)
    with pytest.raises(ValueError, match="`weight` is on cuda:0"):
        flashinfer.rmsnorm(x, w.to("cuda:0"))


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """Rows further apart than 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GiB of GPU memory")
    wide = torch.empty(2**32 + 4096, dtype=torch.bfloat16, device="cuda")
    x = wide.as_strided((3, 4096), (2**31, 1))
    x.copy_(new("cuda", 3, 4096))
    w = new("cuda", 4096)
    expected = expect_rms(x, w, 1e-6)
    flashinfer.rmsnorm(x, w, out=x)
    check(x, expected, 4096)
