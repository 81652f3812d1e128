"""Top-k for k = 1: the largest element of each row, against the definition in double precision."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer import TopKTieBreak
from flashinfer.jit.topk import TopKConfig, TopKOutput, gen_topk_module

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 256, 4095, 16384, 128256, 151936, 262145]
SMALL, LARGE = TopKTieBreak.SMALL, TopKTieBreak.LARGE


def expected(rows: torch.Tensor, tie_break: int) -> torch.Tensor:
    """Indices ``[batch, 1]``: of the elements equal to the largest the first, or the last."""
    values = rows.double()
    values = torch.where(values.isnan(), math.inf, values)
    is_largest = values == values.amax(-1, keepdim=True)
    indices = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape)
    if tie_break == LARGE:
        return torch.where(is_largest, indices, -1).amax(-1, keepdim=True)
    return torch.where(is_largest, indices, rows.shape[1]).amin(-1, keepdim=True)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Signs of zero count, and what NaN there is where kernels run."""
    if not x.is_cuda:  # the reference backend rounds NaN anew
        x = torch.where(x.isnan(), math.nan, x)
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def check(rows: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, tie_break: int) -> None:
    wanted = expected(rows, tie_break)
    assert torch.equal(indices.long(), wanted)
    assert torch.equal(bits(values), bits(rows.gather(-1, wanted)))


def hard_rows(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows with ties, zeros of both signs, denormals, infinities and NaN, 12 of them."""
    rows = torch.randn(12, size, device=device)
    rows[1] = rows[1].mul(2).round()
    rows[2] = 1.0
    rows[3] = -math.inf
    rows[4] = torch.where(rows[4] < 0, -0.0, 0.0)
    rows[5] = -rows[5].abs() - 1
    rows[5, size // 3] = rows[5, size - 1 - size // 3] = -0.5
    rows[6] = rows[6].round() * (1e-7 if dtype == torch.float16 else 1e-40)
    rows[7] = -math.inf
    rows[7, -1] = -3e4
    rows[8, size // 2] = math.nan
    rows[9, size // 2] = math.nan
    rows[9, [0, size // 4, -1]] = math.inf
    rows[10, [size // 4, -1]] = math.inf
    rows[10, [size // 3, size // 2]] = math.nan
    rows[11] = math.nan
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tie_break", list(TopKTieBreak))
@pytest.mark.parametrize("size", SIZES)
def test_hard_rows(size, tie_break, dtype, device):
    rows = hard_rows(size, dtype, device)
    values, indices = flashinfer.top_k(rows, 1, tie_break=tie_break)
    assert values.dtype == dtype and indices.dtype == torch.int64
    check(rows, values, indices, tie_break)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tie_break", [SMALL, LARGE])
@pytest.mark.parametrize(("size", "first", "after"), [(1, 1, 0), (40, 3, 2), (128257, 5, 9)])
def test_parts_of_wider_rows(size, first, after, tie_break, dtype, device):
    """Rows begin anywhere, and what lies between them is larger."""
    wide = torch.full((12, first + size + after), math.inf, dtype=dtype, device=device)
    rows = wide[:, first : first + size]
    rows.copy_(hard_rows(size, dtype, device))
    check(rows, *flashinfer.top_k(rows, 1, tie_break=tie_break), tie_break)


@pytest.mark.parametrize("shape", [(0, 5), (70_001, 9), (70_001, 300), (600, 4097)])
def test_many_rows(shape, device):
    rows = torch.randn(shape, device=device).mul(2).round().bfloat16()
    for tie_break in (SMALL, LARGE):
        values, indices = flashinfer.top_k(rows, 1, tie_break=tie_break)
        assert indices.shape == (shape[0], 1)
        if shape[0]:
            check(rows, values, indices, tie_break)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("max_cluster", [0, 1, 2, 5, 8])
def test_outputs_alone_are_written(max_cluster, index_dtype, dtype):
    """Whatever shares a row. Without a workspace, and with something before and after."""
    run = gen_topk_module(TopKConfig(dtype, TopKOutput.VALUES)).build_and_load().top_k
    for size in (33, 4096, 70_001, 151_936):
        rows = hard_rows(size, dtype, torch.device("cuda"))
        for tie_break in (SMALL, LARGE):
            indices = torch.full((len(rows) + 2, 1), -7, dtype=index_dtype, device="cuda")
            values = torch.full((len(rows) + 2, 1), -7, dtype=dtype, device="cuda")
            run(indices[1:-1], values[1:-1], None, rows, 1, tie_break == LARGE, max_cluster, None)
            check(rows, values[1:-1], indices[1:-1], tie_break)
            for outside in (indices[0], indices[-1], values[0], values[-1]):
                assert outside.item() == -7


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["auto", "cta"])
def test_every_run_gives_the_same(algorithm, monkeypatch):
    monkeypatch.setenv("FLASHINFER_TOPK_ALGO", algorithm)
    rows = torch.randn(64, 128256, device="cuda").mul(2).round().bfloat16()
    for tie_break in (SMALL, LARGE):
        wanted = expected(rows, tie_break)
        for _ in range(50):
            assert torch.equal(flashinfer.top_k(rows, 1, tie_break=tie_break)[1], wanted)


@pytest.mark.gpu
def test_what_the_kernel_before_writes_is_seen():
    """`softmax` lets the next kernel start before it has written."""
    logits = torch.randn(16, 128256, device="cuda")
    for _ in range(20):
        logits.normal_()
        probs = flashinfer.softmax(logits)
        check(probs, *flashinfer.top_k(probs, 1), SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 128256), (1, 151936), (5, 256)])
def test_a_captured_graph_follows_the_rows(shape):
    rows = torch.randn(shape, device="cuda").bfloat16()
    flashinfer.top_k(rows, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, indices = flashinfer.top_k(rows, 1, tie_break=SMALL)
    for _ in range(5):
        rows.normal_()
        values.fill_(-7)
        indices.fill_(-7)
        graph.replay()
        check(rows, values, indices, SMALL)
