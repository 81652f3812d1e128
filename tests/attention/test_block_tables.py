"""``trtllm_batch_*_with_kv_cache``: pages by block tables, lengths wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from tests.attention.batches import (
    BF16,
    E4M3,
    Batch,
    indptr,
    plan_paged,
    randn,
    workspace,
)

DECODE = Batch((1, 1, 1, 1), (700, 0, 64, 33), kv_layout="HND")
PREFILL = Batch((70, 3, 0, 33), (700, 40, 64, 33), kv_layout="HND")


def block_tables(batch: Batch, device: torch.device, beyond: int = 2**30) -> torch.Tensor:
    """[requests, pages and two more], with numbers that no cache has after a request's own."""
    starts, pages, _, _ = batch.table()
    counts = starts.diff().tolist()
    table = torch.full((len(counts), max(counts) + 2), beyond, dtype=torch.int32)
    for row, own in zip(table, pages.split(counts), strict=True):
        row[: len(own)] = own
    return table.to(device)


def usual(batch: Batch, device: torch.device, **changes: Any) -> dict[str, Any]:
    return {
        "query": batch.query(device),
        "kv_cache": batch.cache(device),
        "workspace_buffer": workspace(device),
        "block_tables": block_tables(batch, device),
        "seq_lens": torch.tensor(batch.kv_lens, dtype=torch.int32, device=device),
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
        "kv_layout": batch.kv_layout,
        **changes,
    }


def context(batch: Batch, device: torch.device, **changes: Any) -> dict[str, Any]:
    lengths = {
        "cum_seq_lens_q": indptr(batch.qo_lens).to(device),
        "cum_seq_lens_kv": indptr(batch.kv_lens).to(device),
        "max_q_len": max(batch.qo_lens),
        "max_kv_len": 4096,
        "batch_size": len(batch.qo_lens),
    }
    return usual(batch, device, **{**lengths, **changes})


def same(found: Any, expected: Any) -> None:
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("form", ["tuple", "fused", "strided"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("per_request", [1, 3])
def test_decode(per_request, kv_layout, form, device):
    batch = Batch((per_request,) * 4, DECODE.kv_lens, kv_layout=kv_layout, form=form)
    arguments = usual(batch, device, max_seq_len=700, q_len_per_req=per_request)
    found = trtllm_batch_decode_with_kv_cache(**arguments, window_left=300, return_lse=True)
    wrapper = plan_paged(batch, device, causal=True, sm_scale=0.1, window_left=300)
    expected = wrapper.run(arguments["query"], arguments["kv_cache"], return_lse=True)
    # Lengths on the GPU are planned there, and requests cut elsewhere.
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.016, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("int64", [False, True])
def test_context(int64, causal, backend, device):
    arguments = context(PREFILL, device, backend=backend, causal=causal)
    if int64:
        names = ("block_tables", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv")
        arguments |= {name: arguments[name].long() for name in names}
    found = trtllm_batch_context_with_kv_cache(**arguments, return_lse=True)
    wrapper = plan_paged(PREFILL, device, backend, causal=causal, sm_scale=0.1)
    same(found, wrapper.run(arguments["query"], arguments["kv_cache"], return_lse=True))


def test_rows_by_cumulative_lengths_are_those_of_a_context(device):
    lengths = {"cum_seq_lens_q": indptr(PREFILL.qo_lens), "max_q_len": 70, "max_seq_len": 700}
    found = trtllm_batch_decode_with_kv_cache(**usual(PREFILL, device, **lengths))
    assert torch.equal(found, trtllm_batch_context_with_kv_cache(**context(PREFILL, device)))


def test_lengths_on_the_host_give_the_same(device):
    names = ("seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv")
    there = context(PREFILL, device)
    here = {**there, **{name: there[name].cpu() for name in names}}
    found = trtllm_batch_context_with_kv_cache(**here)
    assert torch.equal(found, trtllm_batch_context_with_kv_cache(**there))


def test_scales_sinks_and_destinations(device):
    batch = Batch(DECODE.qo_lens, DECODE.kv_lens, kv_layout="HND", kv_dtype=E4M3)
    q = batch.query(device)
    sinks = randn((8,), torch.float32, device)
    out, lse = torch.empty_like(q), torch.empty(4, 8, device=device)
    scales = {"bmm1_scale": torch.tensor([0.05], device=device), "bmm2_scale": 2.0}
    arguments = usual(batch, device, max_seq_len=700, sinks=[sinks], **scales)
    result = trtllm_batch_decode_with_kv_cache(**arguments, out=out, lse=lse)
    assert result is out
    wrapper = plan_paged(batch, device, causal=True, sm_scale=0.05)
    run = {"q": q, "paged_kv_cache": arguments["kv_cache"], "v_scale": 2.0, "sinks": sinks}
    expected, expected_lse = wrapper.run(**run, return_lse=True)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.016, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    found = trtllm_batch_decode_with_kv_cache(**{**arguments, "out_dtype": "float16"})
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.016, atol=1e-3)
    assert found.dtype == torch.float16


REFUSED: list[tuple[str, Any]] = [
    ("query", None),
    ("query", torch.zeros(4, 1, 8, 128, dtype=BF16)),
    ("kv_cache", torch.zeros(8, dtype=BF16)),
    ("kv_cache", torch.zeros(5, 3, 2, 16, 128, dtype=BF16)),
    ("workspace_buffer", None),
    ("block_tables", torch.zeros(4, 1, dtype=torch.int32)),
    ("block_tables", torch.zeros(4, 60)),
    ("block_tables", [[0]]),
    ("seq_lens", torch.zeros(3, dtype=torch.int32)),
    ("seq_lens", torch.tensor([700, 0, -64, 33])),
    ("seq_lens", torch.ones(4)),
    ("max_seq_len", 699),
    ("max_seq_len", 700.0),
    ("max_q_len", 0),
    ("cum_seq_lens_q", torch.tensor([0, 1])),
    ("bmm1_scale", "1"),
    ("bmm1_scale", float("nan")),
    ("bmm2_scale", torch.ones(8)),
    ("window_left", -2),
    ("sinks", 3),
    ("kv_layout", "DNH"),
    ("q_len_per_req", 0),
    ("q_len_per_req", 2),
    ("out", 1),
    ("out_dtype", "float8_e4m3fn"),
    ("o_scale", 2.0),
    ("o_sf_scale", 1.0),
    ("mask", torch.ones(4)),
    ("cp_world", 2),
    ("uses_shared_paged_kv_idx", False),
    ("enable_block_sparse_attention", True),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_decode_refuses(name, value, device):
    lengths = torch.tensor(DECODE.kv_lens, dtype=torch.int32)
    arguments = usual(DECODE, device, max_seq_len=700, seq_lens=lengths) | {name: value}
    own_names = {
        "workspace_buffer": "workspace",
        "query": "query|`q`",
        "q_len_per_req": "q_len|`q`",
    }
    with pytest.raises((TypeError, ValueError), match=own_names.get(name, name)):
        trtllm_batch_decode_with_kv_cache(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 3),
        ("cum_seq_lens_q", torch.zeros(4, dtype=torch.int32)),
        ("cum_seq_lens_kv", torch.zeros(5)),
        ("max_q_len", 69),
        ("max_kv_len", 699),
        ("causal", 1),
        ("use_fp16_softmax", True),
        ("backend", "cudnn"),
    ],
)
def test_context_refuses(name, value, device):
    with pytest.raises((TypeError, ValueError), match=name):
        trtllm_batch_context_with_kv_cache(**context(PREFILL, device, **{name: value}))


@pytest.mark.gpu
def test_lengths_of_long_queries_on_the_gpu_cannot_be_captured(device):
    arguments = context(PREFILL, device)
    trtllm_batch_context_with_kv_cache(**arguments)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="`seq_lens` must be on the host"), torch.cuda.graph(graph):
        trtllm_batch_context_with_kv_cache(**arguments)
