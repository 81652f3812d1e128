"""The mixture of experts in 8 bits in CuTe-DSL, part by part and whole, against float64.

On a GPU machine without the DSL they run what `tests/cute_dsl_modules.py` has compiled elsewhere.
"""

from __future__ import annotations

import pytest
import torch

from flashinfer import cute_dsl
from flashinfer.jit.cute_dsl_moe import (
    GEMM_TILES,
    CuteDslGroupedGemmConfig,
    CuteDslMoeActivationConfig,
    CuteDslMoeFinalizeConfig,
    gemm_tile_for,
    gen_cute_dsl_grouped_gemm_module,
    gen_cute_dsl_moe_activation_module,
    gen_cute_dsl_moe_finalize_module,
)
from flashinfer.testing import compare, error_bound, make_tensor, poisoned_like
from tests.cute_dsl_modules import BF16, TOP_KS, need

CODES = torch.float8_e4m3fn
# Bits that tensor cores keep of a product when they add 8-bit floats, less those that 4 k of a sum
# can lose.
TENSOR_CORE = 2.0**-10


def need_gemm(device: torch.device, rows: int, dtype: torch.dtype = BF16) -> None:
    config = CuteDslGroupedGemmConfig(dtype, *GEMM_TILES[gemm_tile_for(rows)])
    need(device, gen_cute_dsl_grouped_gemm_module(config))


def need_activation(device: torch.device, dtype: torch.dtype = BF16) -> None:
    need(device, gen_cute_dsl_moe_activation_module(CuteDslMoeActivationConfig(dtype)))


def need_finalize(device: torch.device, top_k: int, dtype_out: torch.dtype = BF16) -> None:
    config = CuteDslMoeFinalizeConfig(BF16, dtype_out, top_k)
    need(device, gen_cute_dsl_moe_finalize_module(config))


def codes(device, *shape: int) -> torch.Tensor:
    return make_tensor(*shape, dtype=torch.float32, device=device).to(CODES)


def scales(device, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, device=device).add_(0.5)


def counts_of(device, numbers: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def dequantised_rows(a, a_scale):
    experts, rows, k = a.shape
    by_row = a_scale.double().view(k // 128, experts, rows).permute(1, 2, 0)
    return (a.double().view(experts, rows, k // 128, 128) * by_row[..., None]).flatten(2)


def dequantised_weights(b, b_scale):
    n, k = b.shape[1:]
    columns = torch.arange(n, device=b.device) // 128
    blocks = torch.arange(k, device=b.device) // 128
    return b.double() * b_scale.double()[:, columns][:, :, blocks]


def check_product(out, a, b, a_scale, b_scale, numbers):
    left, right = dequantised_rows(a, a_scale), dequantised_weights(b, b_scale)
    for g, count in enumerate(numbers):
        count = min(max(count, 0), a.shape[1])
        expected = left[g, :count] @ right[g].T
        room = TENSOR_CORE * (left[g, :count].abs() @ right[g].abs().T)
        room += expected.abs() * torch.finfo(out.dtype).eps
        assert ((out[g, :count].double() - expected).abs() <= room).all(), f"group {g}"
        assert out[g, count:].isnan().all(), "rows beyond the count are not written"


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("expected_m", [None, 1, 16, 30, 64, 128, 1000], ids=str)
@pytest.mark.parametrize(
    ("numbers", "rows", "n", "k"),
    [
        ([5], 5, 128, 128),
        ([0, 3, 128, 129, 300], 300, 256, 1024),
        ([0, 0], 64, 128, 256),
        ([64, 1, 0, 17] * 40, 64, 384, 512),
        ([700, -1, 900], 800, 200, 2048),
    ],
    ids=str,
)
def test_grouped_gemm(device, numbers, rows, n, k, expected_m, dtype):
    """Every tile, with fewer rows than it has and more, in groups and of the whole tensor."""
    need_gemm(device, min(expected_m or rows, rows), dtype)
    experts = len(numbers)
    a, b = codes(device, experts, rows, k), codes(device, experts, n, k)
    a_scale = scales(device, k // 128, experts * rows)
    b_scale = scales(device, experts, -(-n // 128), k // 128)
    out = torch.full((experts, rows, n), float("nan"), dtype=dtype, device=device)
    counts = counts_of(device, numbers)
    returned = cute_dsl.moe_grouped_gemm_cutedsl(
        *(a, b, a_scale, b_scale, counts, out), expected_m=expected_m
    )
    assert returned is out
    check_product(out, a, b, a_scale, b_scale, numbers)


@pytest.mark.gpu
def test_grouped_gemm_with_strides_and_long_counts(device):
    """Experts' matrices with gaps, counts of 64 bits, and results that repeat."""
    need_gemm(device, 140)
    numbers = [40, 130]
    a = codes(device, 2, 150, 512)[:, :140, :256]
    b = codes(device, 2, 256, 512)[:, :, 128:384]
    a_scale, b_scale = scales(device, 2, 280), scales(device, 2, 2, 2)
    out = torch.full((2, 140, 512), float("nan"), dtype=BF16, device=device)[:, :, 128:384]
    counts = counts_of(device, numbers, torch.int64)
    cute_dsl.moe_grouped_gemm_cutedsl(a, b, a_scale, b_scale, counts, out, True)
    check_product(out, a, b, a_scale, b_scale, numbers)
    again = torch.empty_like(out)
    cute_dsl.moe_grouped_gemm_cutedsl(a, b, a_scale, b_scale, counts, again)
    for g, count in enumerate(numbers):
        assert torch.equal(again[g, :count], out[g, :count])


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("numbers", "rows", "width"),
    [([5], 5, 128), ([0, 3, 70], 64, 640), ([33, -2], 33, 256), ([1] * 100, 2, 2048)],
    ids=str,
)
def test_activation(device, numbers, rows, width, dtype):
    need_activation(device, dtype)
    experts = len(numbers)
    x = make_tensor(experts, rows, 2 * width, dtype=dtype, device=device, std=3.0)
    out = torch.full((experts, rows, width), float("nan"), device=device).to(CODES)
    scale = torch.full((width // 128, experts * rows), float("nan"), device=device)
    cute_dsl.moe_activation(x, counts_of(device, numbers), out, scale)
    gate, up = x.double().chunk(2, dim=-1)
    y = gate / (1 + torch.exp(-gate)) * up
    for g, count in enumerate(numbers):
        count = min(max(count, 0), rows)
        blocks = y[g, :count].view(count, width // 128, 128)
        own = scale.view(-1, experts, rows)[:, g]
        expected_scale = blocks.abs().amax(dim=-1).clamp(min=1e-10).T / 448
        assert compare(own[:, :count], expected_scale, bound=error_bound(torch.float32, 4))
        quotients = (blocks / expected_scale.T[..., None]).flatten(1)
        assert compare(out[g, :count], quotients, bound=error_bound(CODES, 4))
        assert own[:, count:].isnan().all() and out[g, count:].float().isnan().all()


@pytest.mark.parametrize("dtype_out", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("top_k", TOP_KS)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (13, 2056), (300, 4096)])
def test_finalize(device, tokens, hidden, top_k, dtype_out):
    need_finalize(device, top_k, dtype_out)
    rows = make_tensor(tokens * top_k + 3, hidden, dtype=BF16, device=device)
    order = torch.randperm(rows.shape[0], device=device)[: tokens * top_k]
    entries = order.int().view(tokens, top_k)
    weights = torch.rand(tokens, top_k, device=device)
    entries[0, 0], weights[0, 0] = -1, float("nan")
    entries[-1, -1] = rows.shape[0] if top_k % 2 else 2**31 - 1  # beyond the last row
    out = poisoned_like(torch.empty(tokens, hidden, dtype=dtype_out, device=device))
    assert cute_dsl.moe_finalize(rows, entries, weights, out) is out
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    sizes = torch.zeros_like(expected)
    for j in range(top_k):
        there = ((entries[:, j] >= 0) & (entries[:, j] < rows.shape[0]))[:, None]
        part = rows[(entries[:, j] * there[:, 0]).long()].double() * weights[:, j : j + 1].double()
        expected += torch.where(there, part, 0.0)
        sizes += torch.where(there, part.abs(), 0.0)
    bound = error_bound(dtype_out, top_k, magnitude=float(sizes.max()))
    assert compare(out, expected, bound=bound)


@pytest.mark.gpu
def test_whole_pipeline_in_a_graph(device):
    """Two products, the activation and the sum, captured and replayed with other counts."""
    need_gemm(device, 96)
    need_activation(device)
    need_finalize(device, 2)
    experts, rows, hidden, width = 4, 96, 512, 256
    x, w1 = codes(device, experts, rows, hidden), codes(device, experts, 2 * width, hidden)
    w2 = codes(device, experts, hidden, width)
    scale1 = scales(device, experts, 2 * width // 128, hidden // 128) * 0.02
    scale2 = scales(device, experts, hidden // 128, width // 128) * 0.02
    x_scale = scales(device, hidden // 128, experts * rows)
    entries = torch.arange(8, dtype=torch.int32, device=device).view(4, 2) * rows // 2
    weights, counts = torch.rand(4, 2, device=device), counts_of(device, [50, 96, 1, 50])

    def run():
        first = cute_dsl.moe_grouped_gemm_cutedsl(x, w1, x_scale, scale1, counts)
        middle, middle_scale = cute_dsl.moe_activation(first, counts)
        second = cute_dsl.moe_grouped_gemm_cutedsl(middle, w2, middle_scale, scale2, counts)
        return cute_dsl.moe_finalize(second.flatten(0, 1), entries, weights)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    counts.copy_(counts_of(device, [96, 49, 50, 96]))
    graph.replay()
    hidden_rows = dequantised_rows(x, x_scale) @ dequantised_weights(w1, scale1).transpose(1, 2)
    gate, up = hidden_rows.chunk(2, dim=-1)
    made = torch.nn.functional.silu(gate) * up @ dequantised_weights(w2, scale2).transpose(1, 2)
    expected = (made.flatten(0, 1)[entries.long()] * weights.double()[..., None]).sum(dim=1)
    likeness = torch.nn.functional.cosine_similarity(
        captured.double().flatten(), expected.flatten(), dim=0
    )
    assert likeness > 0.999


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(5, 256)}, "`a` must have 3 dimensions"),
        ({"a_scale": torch.zeros(10, 2)}, r"`a_scale` must have shape \[2, 10\], got \[10, 2\]"),
        ({"a_scale": torch.zeros(10, 2).T}, "`a_scale` must be contiguous"),
        ({"expected_m": 0}, "`expected_m` must be from 1 to"),
        ({}, "must be a CUDA tensor"),
    ],
    ids=str,
)
def test_refusals_of_the_product(change, message):
    arguments = {
        "a": torch.zeros(2, 5, 256).to(CODES),
        "b": torch.zeros(2, 128, 256).to(CODES),
        "a_scale": torch.zeros(2, 10),
        "b_scale": torch.zeros(2, 1, 2),
        "masked_m": torch.zeros(2, dtype=torch.int32),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        cute_dsl.moe_grouped_gemm_cutedsl(**arguments)


def test_refusals_of_the_others():
    rows = torch.zeros(4, 256, dtype=BF16)
    with pytest.raises(ValueError, match="`input` must have a last dimension that is a multiple"):
        cute_dsl.moe_activation(torch.zeros(2, 5, 300, dtype=BF16), torch.zeros(2).int())
    with pytest.raises(ValueError, match="`rows` must be a CUDA tensor"):
        cute_dsl.moe_finalize(rows, torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="`entry_row` must have 1 to 32 columns"):
        CuteDslMoeFinalizeConfig(BF16, BF16, 33)
    with pytest.raises(ValueError, match="there is one kernel"):
        CuteDslGroupedGemmConfig(BF16, gathers=True)
    with pytest.raises(ValueError, match="there is no kernel with the tile"):
        CuteDslGroupedGemmConfig(BF16, tile_rows=24)
