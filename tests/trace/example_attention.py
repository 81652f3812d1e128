"""Calls of ``example.py``: attention."""

from __future__ import annotations

import torch

import flashinfer
from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.mla import (
    BatchMLAPagedAttentionWrapper,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from flashinfer.prefill import (
    trtllm_batch_context_with_kv_cache,
    trtllm_ragged_attention_deepseek,
)
from flashinfer.sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
    convert_bsr_mask_layout,
)

NUM_TOKENS = 32
HEADS = (32, 8, 128)  # of queries, of keys and values, elements: Llama 3.1 8B
QO_LENS, KV_LENS = (7, 1, 24), (40, 33, 24)


def make_calls(dtype: torch.dtype) -> None:
    call_latent_attention(dtype)
    call_attention(dtype)
    call_table_attention(dtype)
    call_planned_attention(dtype)
    call_mixed_attention(dtype)
    call_sparse_attention(dtype)


def call_latent_attention(dtype) -> None:
    """DeepSeek V3 on one GPU, with pages of 64."""
    wrapper = BatchMLAPagedAttentionWrapper(workspace())
    starts, pages, _ = page_table(KV_LENS, 64)
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    sizes = (128, 512, 64, 64, True, 192**-0.5, dtype, dtype)
    wrapper.plan(indptr(QO_LENS), starts, pages, lengths, *sizes)
    query = torch.randn(NUM_TOKENS, 128, 576, dtype=dtype)
    cache = torch.randn(len(pages), 64, 576, dtype=dtype)
    call = (
        query[:3, None],
        cache,
        workspace(),
        128,
        512,
        64,
        pages[:3, None],
        lengths.clamp(max=64),
    )
    for return_lse in (False, True):
        wrapper.run(query=query, kv_cache=cache, return_lse=return_lse)
        trtllm_batch_decode_with_kv_cache_mla(
            *call, 64, bmm1_scale=192**-0.5, return_lse=return_lse
        )
    xqa_batch_decode_with_kv_cache_mla(*call, 64, bmm1_scale=192**-0.5)


def workspace():
    return torch.empty(32 << 20, dtype=torch.uint8)


def page_table(lengths, page_size=16):
    """First pages, page numbers and tokens in last pages of requests."""
    pages = [-(-n // page_size) for n in lengths]
    last = [n - (count - 1) * page_size for n, count in zip(lengths, pages, strict=True)]
    return indptr(pages), torch.arange(sum(pages)).int(), torch.tensor(last).int()


def indptr(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def call_attention(dtype) -> None:
    q, (k, v) = torch.randn(7, 32, 128, dtype=dtype), torch.randn(2, 40, 8, 128, dtype=dtype)
    for return_lse in (False, True):
        flashinfer.single_decode_with_kv_cache(q[0], k, v, return_lse=return_lse)
        flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=return_lse)
    mask = torch.ones(7, 40, dtype=torch.bool)
    flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)


def call_table_attention(dtype) -> None:
    """One token of each request, whose pages a table lists."""
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    cache = torch.randn(2, 9, 8, 16, 128, dtype=dtype)
    tables = torch.arange(9, dtype=torch.int32).view(3, 3)
    q, first = torch.randn(NUM_TOKENS, 32, 128, dtype=dtype), indptr(KV_LENS)
    pages = (cache[0], cache[1])
    shared = (pages, workspace(), tables, lengths)
    xqa_batch_decode_with_kv_cache(q[:3], *shared, 48, 128**-0.5, kv_layout="HND")
    keys, values = torch.randn(97, 128, 192, dtype=dtype), torch.randn(97, 128, 128, dtype=dtype)
    queries = torch.randn(NUM_TOKENS, 128, 192, dtype=dtype)
    for return_lse in (False, True):
        trtllm_batch_decode_with_kv_cache(q[:3], *shared, 48, 128**-0.5, return_lse=return_lse)
        trtllm_batch_context_with_kv_cache(
            q, *shared, 24, 48, 128**-0.5, 1.0, 3, indptr(QO_LENS), first, return_lse=return_lse
        )
        trtllm_ragged_attention_deepseek(
            queries, keys, values, workspace(), lengths, 24, 48, 192**-0.5, 1.0, 1.0, 3, -1,
            indptr(QO_LENS), first, None, True, return_lse,
        )  # fmt: skip
        cudnn_batch_decode_with_kv_cache(
            torch.randn(3, 32, 128, dtype=dtype), *cache, 128**-0.5, workspace(),
            max_sequence_kv=48, actual_seq_lens_kv=lengths, block_tables=tables,
            return_lse=return_lse,
        )  # fmt: skip


def call_planned_attention(dtype) -> None:
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    cache = torch.randn(9, 2, 16, 8, 128, dtype=dtype)
    table = page_table(KV_LENS)
    q = torch.randn(NUM_TOKENS, 32, 128, dtype=dtype)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.plan(*table, *HEADS, 16, **dtypes)
    decode.run(q[:3], cache)
    decode.run(q[:3], cache, return_lse=True)
    decode.plan(*table, *HEADS, 16, q_len_per_req=4, **dtypes)
    decode.run(q[:12], cache)
    decode.run(q[:12], cache, return_lse=True)

    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    paged.plan(indptr(QO_LENS), *table, *HEADS, 16, causal=True, **dtypes)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(indptr(QO_LENS), indptr(KV_LENS), *HEADS, causal=True, **dtypes)
    k, v = torch.randn(2, sum(KV_LENS), 8, 128, dtype=dtype)
    for lse in ({}, {"return_lse": True}, {"return_lse": True, "lse_layout": "HN"}):
        paged.run(q, cache, **lse)
        ragged.run(q, k, v, **lse)


def call_mixed_attention(dtype) -> None:
    """Prefill and decode in one launch; levels of shared keys; sinks; an image in a prompt."""
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    cache = torch.randn(9, 2, 16, 8, 128, dtype=dtype)
    table = page_table(KV_LENS)
    q = torch.randn(NUM_TOKENS, 32, 128, dtype=dtype)
    mixed = flashinfer.BatchAttention(device=str(q.device))
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    sizes = (*HEADS, 128, 16)
    mixed.plan(indptr(QO_LENS), *table[:2], lengths, *sizes, causal=True, **dtypes)
    mixed.run(q, cache)

    sinks = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(), **dtypes)
    sinks.plan(indptr(QO_LENS), *table, *HEADS, 16, causal=True, **dtypes)
    for return_lse in (False, True):
        sinks.run(q, cache, torch.zeros(32), return_lse=return_lse)

    ranges = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), **dtypes)
    ranges.plan(indptr(QO_LENS), *table, *HEADS, 16)
    image = torch.tensor([35, 39], dtype=torch.int32).repeat(NUM_TOKENS, 1)
    for return_lse in (False, True):
        ranges.run(q, cache, image, return_lse=return_lse)

    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    queries = [indptr([NUM_TOKENS]), indptr(QO_LENS)]
    levels = zip(page_table([64]), table, strict=True)
    cascade.plan(queries, *map(list, levels), *HEADS, 16, causal=True, **dtypes)
    cascade.run(q, cache)

    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    pod.plan(*table, *HEADS, 16, **dtypes)
    k, v = torch.randn(2, 40, 8, 128, dtype=dtype)
    for p in (False, True):
        for d in (False, True):
            lse = {"return_lse_p": p, "return_lse_d": d}
            pod.run(q[:29], k, v, q[29:], cache, causal_p=True, **lse)
    pods = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    pods.plan(indptr(QO_LENS), *table, indptr([1] * 3), *table, *HEADS, 16, **dtypes)
    for return_lse in (False, True):
        pods.run(q, cache, q[:3], cache, causal_p=True, return_lse=return_lse)


def call_sparse_attention(dtype) -> None:
    convert_bsr_mask_layout(torch.ones(3, 16, 16, dtype=torch.bool), torch.tensor([0, 2, 3]).int())
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    q, (k, v) = torch.randn(32, 32, 128, dtype=dtype), torch.randn(2, 64, 8, 128, dtype=dtype)
    blocks = BlockSparseAttentionWrapper(workspace())
    table = torch.tensor([0, 2, 3]).int(), torch.tensor([0, 3, 2]).int()
    blocks.plan(*table, 32, 64, 16, 16, *HEADS, **dtypes, o_data_type=dtype)
    variable = VariableBlockSparseAttentionWrapper(workspace())
    seen = torch.ones(8, 2, 2, dtype=torch.bool)
    rows, columns = (torch.tensor([sizes] * 8).int() for sizes in ([20, 12], [10, 54]))
    variable.plan(seen, rows, columns, *HEADS, **dtypes)
    for return_lse in (False, True):
        blocks.run(q, k, v, return_lse=return_lse)
        heads_first = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        variable.run(*heads_first, return_lse=return_lse)
