"""Scores of sparse attention against their references in float64, paged and by ranges."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import dense_mqa, paged_mqa
from flashinfer.trace.templates.mqa_logits import _paged_reference, _ragged_reference
from tests.mla.batches import need_hopper

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    need_hopper(device)


def paged(
    device: torch.device, lengths: list[int], next_n: int, heads: int, page_size: int = 64
) -> dict[str, Any]:
    """Arguments of a call; pages in random order."""
    generator = torch.Generator().manual_seed(sum(lengths))
    width = max(-(-n // page_size) for n in lengths) + 1
    pages, batch = width * len(lengths), len(lengths)
    keys = torch.randn(pages, page_size * 128, generator=generator).to(FP8).view(torch.uint8)
    scales = torch.rand(pages, page_size, generator=generator) + 0.1
    cache = torch.cat([keys, scales.view(torch.uint8)], 1).view(pages, page_size, 1, 132)
    order = torch.randperm(pages, generator=generator).int()
    q = torch.randn(batch, next_n, heads, 128, generator=generator).to(FP8)
    weights = torch.randn(batch * next_n, heads, generator=generator)
    tensors = (q, cache, weights, order.view(batch, width), torch.tensor(lengths).int())
    names = ("q", "kv_fused", "weights", "block_tables", "seq_lens")
    arguments = {name: t.to(device) for name, t in zip(names, tensors, strict=True)}
    return {**arguments, "max_seq_len": max(lengths)}


def check(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-3) -> None:
    """Seen tokens are close. Tensor cores keep some 14 bits of 8-bit products."""
    seen = torch.isfinite(expected)
    assert torch.isfinite(got[seen]).all()
    error = (got.double() - expected)[seen].norm() / expected[seen].norm().clamp(min=1e-9)
    assert error < tolerance


@pytest.mark.parametrize(
    ("lengths", "next_n", "heads", "page_size"),
    [
        ([1, 64, 300, 5000], 1, 64, 64),
        ([1000, 2, 257, 0, 256] * 30, 2, 64, 64),
        ([3, 777], 4, 64, 32),
        ([500, 1300], 3, 32, 12),
        ([900], 5, 8, 64),
        ([40000], 1, 128, 128),
    ],
)
def test_paged(
    device: torch.device, lengths: list[int], next_n: int, heads: int, page_size: int
) -> None:
    arguments = paged(device, lengths, next_n, heads, page_size)
    got = flashinfer.fp8_paged_mqa_logits(**arguments)
    expected = _paged_reference(**arguments)
    check(got, expected)
    assert torch.equal(torch.isneginf(got), torch.isinf(expected))
    assert torch.equal(got, flashinfer.fp8_paged_mqa_logits(**arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wider_destination_and_other_names(device: torch.device, dtype: torch.dtype) -> None:
    arguments = paged(device, [70, 400], 1, 64)
    expected = _paged_reference(**arguments)
    out = torch.full((2, flashinfer.padded_seq_len(400)), 7, dtype=dtype, device=device)
    got = flashinfer.fp8_paged_mqa_logits(**arguments, output_dtype=dtype, out=out)
    assert got.data_ptr() == out.data_ptr() and got.shape == (2, 400)
    check(got, expected, 1e-2)
    assert (out[:, 400:] == 7).all()
    refused = {"weights": arguments["weights"].half(), "kv_fused": arguments["kv_fused"][..., :128]}
    for name, wrong in refused.items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            call = {**arguments, name: wrong}
            flashinfer.fp8_paged_mqa_logits(**call, output_dtype=dtype, out=out.fill_(7))
        assert (out == 7).all()
    lens, table = arguments["seq_lens"], arguments["block_tables"]
    meta = paged_mqa.get_paged_mqa_logits_metadata(lens, 64, 5)
    same = paged_mqa.fp8_paged_mqa_logits(
        arguments["q"], arguments["kv_fused"], arguments["weights"], lens, table, meta, 400, True
    )
    check(same, expected)
    assert torch.equal(torch.isneginf(same), torch.isinf(expected))


@pytest.mark.gpu
def test_schedule_and_graph(device: torch.device) -> None:
    arguments = paged(device, [300, 5000, 1], 2, 64)
    lens = arguments["seq_lens"]
    meta = flashinfer.compute_paged_mqa_logits_schedule(lens)
    parts, units, before = meta.shape[0] - 1, [2, 20, 1], [0, 2, 22]
    for i in range(parts + 1):  # part i begins with unit floor(i total / parts)
        request, unit = meta[i].tolist()
        begin = i * sum(units) // parts
        assert (request, unit) == (3, 0) if i == parts else before[request] + unit == begin
    out = torch.empty(6, 5000, device=device)
    flashinfer.fp8_paged_mqa_logits(**arguments, schedule_meta=meta, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.compute_paged_mqa_logits_schedule(lens, out=meta)
        flashinfer.fp8_paged_mqa_logits(**arguments, schedule_meta=meta, out=out)
    for lengths in ([4000, 3, 900], [300, 5000, 1]):
        lens.copy_(torch.tensor(lengths))
        graph.replay()
        check(out, _paged_reference(**arguments))


@pytest.mark.parametrize(
    ("queries", "keys", "heads"), [(1, 1000, 64), (37, 700, 64), (1100, 1100, 32), (9, 300, 8)]
)
@pytest.mark.parametrize("clean", [False, True])
def test_ranges(device: torch.device, queries: int, keys: int, heads: int, clean: bool) -> None:
    generator = torch.Generator().manual_seed(queries)
    draw = random.Random(queries)
    q = torch.randn(queries, heads, 128, generator=generator).to(FP8).to(device)
    k = torch.randn(keys, 128, generator=generator).to(FP8).to(device)
    scales = (torch.rand(keys, generator=generator) + 0.1).to(device)
    weights = torch.randn(queries, heads, generator=generator).to(device)
    starts = [draw.randint(0, keys // 3) for _ in range(queries)]
    ends = [draw.randint(0, keys) for _ in range(queries)]
    ks, ke = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, ends))
    got = dense_mqa.fp8_mqa_logits(q, (k, scales), weights, ks, ke, clean)
    expected = _ragged_reference(q, (k, scales), weights, ks, ke)
    check(got, expected)
    assert torch.equal(torch.isneginf(got), torch.isinf(expected))


def test_best_tokens_go_to_sparse_attention(device: torch.device) -> None:
    arguments = paged(device, [4000, 2500], 1, 64)
    logits = flashinfer.fp8_paged_mqa_logits(**arguments)
    table = torch.arange(4000, dtype=torch.int32, device=device).expand(2, 4000).contiguous()
    chosen = flashinfer.top_k_page_table_transform(logits, table, arguments["seq_lens"], 2048)
    expected = _paged_reference(**arguments)
    for i in range(2):
        best = expected[i].topk(2048).indices
        missed = set(best.tolist()) - set(chosen[i].tolist())
        assert len(missed) < 20  # those whose scores differ by less than the products' error
