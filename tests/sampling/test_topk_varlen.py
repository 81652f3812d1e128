"""Top-k over rows of different lengths."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.testing import assert_matches_reference
from flashinfer.topk_varlen import top_k_varlen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize(("columns", "k"), [(300, 17), (8192, 512), (60000, 2048)])
def test_top_k_varlen(columns, k, next_n, dtype, device):
    torch.manual_seed(columns)
    lengths = torch.tensor([columns, 1, 0, k, k + 1, columns // 2], dtype=torch.int32)
    logits = torch.randn(len(lengths) * next_n, columns, device=device).to(dtype)
    for ratio in (1, 4):
        assert_matches_reference(
            top_k_varlen,
            logits=logits,
            seq_lens=(lengths * ratio).to(device),
            top_k=k,
            next_n=next_n,
            compress_ratio=ratio,
        )


def test_a_captured_graph_follows_the_lengths(device):
    logits = torch.randn(8, 5000, device=device)
    lengths = torch.full((8,), 5000, dtype=torch.int32, device=device)
    out = torch.empty(8, 64, dtype=torch.int32, device=device)
    flashinfer.top_k_varlen(logits, lengths, 64, out_indices=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, values = flashinfer.top_k_varlen(
            logits, lengths, 64, out_indices=out, return_values=True
        )
    logits.normal_()
    lengths.copy_(torch.arange(8) * 100)
    graph.replay()
    expected, chosen = flashinfer.top_k_varlen(logits, lengths, 64, return_values=True)
    assert torch.equal(out, expected) and torch.equal(values, chosen)
    assert int((out >= 0).sum()) == 7 * 64
