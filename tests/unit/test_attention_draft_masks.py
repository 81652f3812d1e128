"""Decode as XQA has it: masks of drafts, and caches whose keys are the values, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.jit.attention.config import AttentionConfig

HEADS, KV_HEADS, DIM, PAGE, WIDTH = 4, 2, 64, 16, 5


@pytest.fixture(autouse=True)
def on_the_reference_backend():
    with flashinfer.reference_backend():
        yield


def packed(seen: torch.Tensor) -> torch.Tensor:
    """Bools `[..., queries]` as uint16 words, two for each 32 queries."""
    padded = torch.nn.functional.pad(seen.int(), (0, -seen.shape[-1] % 32))
    bits = padded.unflatten(-1, (-1, 16)) << torch.arange(16)
    return bits.sum(-1, dtype=torch.int32).to(torch.uint16)


def trees(rows: int, tokens: int) -> torch.Tensor:
    """Random ancestors of each query, itself among them."""
    generator = torch.Generator().manual_seed(tokens)
    seen = torch.rand(rows, tokens, generator=generator) < 0.5
    own = torch.arange(rows)[:, None] % tokens == torch.arange(tokens)
    return seen | own


def batch(counts: list[int], lengths: list[int]) -> dict[str, Any]:
    torch.manual_seed(3)
    pages = torch.randperm(len(counts) * WIDTH).int().view(len(counts), WIDTH)
    cache = [torch.randn(len(counts) * WIDTH, PAGE, KV_HEADS, DIM).half() for _ in range(2)]
    return {
        "query": torch.randn(sum(counts), HEADS, DIM).half(),
        "kv_cache": tuple(cache),
        "workspace_buffer": torch.empty(32 << 20, dtype=torch.uint8),
        "block_tables": pages,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "max_seq_len": WIDTH * PAGE,
        "bmm1_scale": DIM**-0.5,
        "kv_layout": "NHD",
    }


def expected(call: dict[str, Any], counts: list[int], seen: torch.Tensor) -> torch.Tensor:
    results, begin = [], 0
    for i, (queries, keys) in enumerate(zip(counts, call["seq_lens"].tolist(), strict=True)):
        q = call["query"][begin : begin + queries].double()
        k, v = (
            part[call["block_tables"][i].long()].flatten(0, 1)[:keys].double()
            for part in call["kv_cache"]
        )
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        visible = torch.ones(queries, keys, dtype=torch.bool)
        visible[:, keys - queries :] = seen[begin : begin + queries, :queries]
        logits = torch.einsum("qhd,khd->hqk", q, k) * call["bmm1_scale"]
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights, v))
        begin += queries
    return torch.cat(results)


@pytest.mark.parametrize("tokens", [2, 7, 32, 40])
def test_each_query_sees_what_its_bits_say(tokens: int):
    counts = [tokens] * 3
    call, seen = batch(counts, [tokens, 64, 80]), trees(3 * tokens, tokens)
    mask = packed(seen).view(3, tokens, -1)
    for function in (xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache):
        found = function(**call, q_len_per_req=tokens, mask=mask)
        torch.testing.assert_close(found.double(), expected(call, counts, seen), rtol=0, atol=2e-3)


def test_rows_of_requests_have_their_own_bits():
    counts = [3, 1, 5, 0]
    call, seen = batch(counts, [33, 4, 60, 7]), trees(9, 5)
    seen |= torch.arange(5) == 0  # so that nobody sees nothing
    first = torch.tensor([0, 3, 4, 9, 9], dtype=torch.int32)
    larger = torch.cat([packed(seen), torch.zeros(4, 2, dtype=torch.uint16)])
    for mask in (packed(seen), larger):
        found = xqa_batch_decode_with_kv_cache(
            **call, q_len_per_req=5, q_cu_seq_lens=first, mask=mask
        )
        torch.testing.assert_close(found.double(), expected(call, counts, seen), rtol=0, atol=2e-3)


def test_xqa_takes_the_same_mask():
    call, seen = batch([4, 4], [33, 9]), trees(8, 4)
    mask = packed(seen).view(2, 4, 2)
    q = call["query"].view(2, 1, 4, HEADS, DIM)
    out, workspace = torch.empty_like(q), call["workspace_buffer"]
    flashinfer.xqa(
        q,
        *call["kv_cache"],
        call["block_tables"],
        call["seq_lens"],
        out,
        workspace,
        workspace,
        KV_HEADS,
        PAGE,
        q_seq_len=4,
        mask=mask,
    )
    assert torch.equal(
        out.view(-1, HEADS, DIM), xqa_batch_decode_with_kv_cache(**call, q_len_per_req=4, mask=mask)
    )


def test_kernels_for_hopper_have_none():
    half = torch.float16
    with pytest.raises(ValueError, match="fa3.*masks of drafts"):
        AttentionConfig(half, half, half, 128, 128, 128, mask_mode="draft", backend="fa3")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_of_one_part_is_keys_and_values(layout: str):
    call = batch([1, 1], [33, 9])
    k = call["kv_cache"][0]
    k = k if layout == "NHD" else k.transpose(1, 2).contiguous()
    call |= {"kv_layout": layout, "kv_cache": (k, k)}
    for function in (xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache):
        shared = function(**{**call, "kv_cache": k[:, None]})
        assert torch.equal(shared, function(**call))


def test_what_is_no_mask_is_refused():
    call = batch([3, 3], [33, 9])
    mask = packed(trees(6, 3)).view(2, 3, 2)
    for wrong in (
        mask.int(),
        mask[:, :2],
        mask[:1],
        mask[..., :1],
        mask.view(-1),
        [1, 2],
    ):
        with pytest.raises((TypeError, ValueError), match="`mask`"):
            xqa_batch_decode_with_kv_cache(**call, q_len_per_req=3, mask=wrong)
    single = {**call, "query": call["query"][:2]}
    with pytest.raises(ValueError, match="`mask` must be left out with `q_len_per_req` 1"):
        xqa_batch_decode_with_kv_cache(**single, mask=mask)
    first = torch.tensor([0, 3, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="`max_q_len` must be given with `mask`"):
        trtllm_batch_decode_with_kv_cache(**call, cum_seq_lens_q=first, mask=mask)
