"""Gated activations against expectations written here, independently of flashinfer/trace.

They run on the GPU, and on a machine without one under the reference backend.
"""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer.testing import compare, error_bound, make_tensor, poisoned_like

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def expect_silu(x):
    return x / (1 + torch.exp(-x))


def expect_gelu(x):
    return x * 0.5 * torch.special.erfc(-x / math.sqrt(2))


def expect_gelu_tanh(x):
    # (1 + tanh(u)) / 2 as 1 / (1 + exp(-2u)): the left tail would cancel, in float64 too.
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x / (1 + torch.exp(-2 * u))


OPS = {
    "silu_and_mul": (flashinfer.silu_and_mul, expect_silu),
    "gelu_and_mul": (flashinfer.gelu_and_mul, expect_gelu),
    "gelu_tanh_and_mul": (flashinfer.gelu_tanh_and_mul, expect_gelu_tanh),
}


@pytest.fixture(params=OPS, ids=str)
def op(request):
    return OPS[request.param]


def expected_of(expect, x):
    gate, up = x.double().chunk(2, dim=-1)
    return expect(gate) * up


def check(actual, expected):
    result = compare(actual, expected, bound=error_bound(actual.dtype, 1, operations=32))
    assert result, str(result)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 2), (3, 14), (1, 28672), (64, 512), (7, 1998), (2, 3, 4, 64), (10,)], ids=str
)
def test_matches(device, op, shape, dtype):
    api, expect = op
    x = make_tensor(*shape, dtype=dtype, device=device, std=3.0)
    out = poisoned_like(x[..., : shape[-1] // 2].contiguous())
    assert api(x, out) is out
    check(out, expected_of(expect, x))
    fresh = api(x)
    assert fresh.shape == out.shape and torch.equal(fresh, out)


@pytest.mark.parametrize("gap,offset", [(16, 0), (5, 0), (64, 8), (0, 1)], ids=str)
def test_strided_and_misaligned_rows(device, op, gap, offset):
    api, expect = op
    x = make_tensor(
        9, 1024, dtype=torch.bfloat16, device=device, row_stride=1024 + gap, storage_offset=offset
    )
    out = poisoned_like(
        make_tensor(
            9, 512, dtype=torch.bfloat16, device=device, row_stride=512 + gap, storage_offset=offset
        )
    )
    api(x, out)
    check(out, expected_of(expect, x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_whole_range_of_the_gate(device, op, dtype):
    """Every bfloat16 value of the gate, infinities and NaN included."""
    api, expect = op
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    gate = codes.view(torch.bfloat16).to(dtype).to(device)
    x = torch.cat([gate, torch.ones_like(gate)])[None]
    out, expected = api(x)[0], expect(gate.double())
    # -inf times zero: NaN in any order of operations.
    finite = ~torch.isneginf(gate) & ~gate.isnan()
    assert out[gate.isnan() | torch.isneginf(gate)].isnan().all()
    # Results below the normal range of float32 may be flushed.
    tiny = torch.finfo(torch.float32).tiny * 4
    normal = finite & (expected.abs() >= tiny)
    check(out[normal], expected[normal])
    rest = finite & ~normal
    assert (out[rest].double() - expected[rest]).abs().max() <= tiny


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0,)], ids=str)
def test_empty(device, op, shape):
    api, _ = op
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    assert api(x).shape == (*shape[:-1], shape[-1] // 2)


def test_more_rows_than_a_grid_dimension(device, op):
    api, expect = op
    x = make_tensor(70_000, 32, dtype=torch.float16, device=device)
    check(api(x), expected_of(expect, x))


def test_pdl_changes_no_bit(device, op):
    api, _ = op
    x = make_tensor(64, 2048, dtype=torch.bfloat16, device=device)
    expected = api(x, enable_pdl=False)
    assert all(torch.equal(api(x), expected) for _ in range(20))


@pytest.mark.gpu
def test_graph_and_stream(device, op):
    api, expect = op
    x = make_tensor(64, 2048, dtype=torch.bfloat16, device=device)
    out = torch.empty(64, 1024, dtype=torch.bfloat16, device=device)
    api(x, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api(x, out)
    x.copy_(make_tensor(64, 2048, dtype=torch.bfloat16, device=device))
    graph.replay()
    check(out, expected_of(expect, x))
