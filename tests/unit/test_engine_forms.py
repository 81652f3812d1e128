"""Forms of calls in which engines differ from each other, on the reference backend.

LightLLM, mini-sglang, Text Generation Inference and TensorRT-LLM call the same wrappers as vLLM and
SGLang, with other workspaces, offsets, caches and scales: each form gives what the plain call does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.reference_backend import reference_backend

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 4
COUNTS = (HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
LENGTHS = (5, 1, 11)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


INDPTR, LAST = _ints(0, 2, 3, 6), _ints(1, 1, 3)
PAGES = _ints(4, 0, 7, 2, 5, 1)


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with reference_backend():
        yield


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(3, HEADS, HEAD_DIM, dtype=BF16)


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.randn(9, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=BF16)


def _workspace(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(1 << 20, dtype=dtype)


def _plain(q: torch.Tensor, cache: Any, kv_dtype: torch.dtype = BF16, **scales: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace())
    wrapper.plan(INDPTR, PAGES, LAST, *COUNTS, q_data_type=BF16, kv_data_type=kv_dtype)
    return wrapper.run(q, cache, **scales)


def test_decoding_requests_behind_prompts_in_one_page_table(
    q: torch.Tensor, cache: torch.Tensor
) -> None:
    """AutoDeploy plans the prompts and the rest by parts of the same offsets and all page numbers;
    those of the rest begin where the prompts' end."""
    expected = _plain(q, cache)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace())
    wrapper.plan(INDPTR[1:], PAGES, LAST[1:], *COUNTS, q_data_type=BF16)
    assert torch.equal(wrapper.run(q[1:], cache), expected[1:])


def test_latent_caches_behind_prompts_in_one_page_table() -> None:
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace())
    rows = [torch.randn(3, 16, width, dtype=BF16) for width in (512, 64)]
    caches = [torch.randn(9, PAGE_SIZE, width, dtype=BF16) for width in (512, 64)]
    types = {"q_data_type": BF16, "kv_data_type": BF16}
    options = {"causal": True, "sm_scale": 192**-0.5, **types}
    sizes = (16, 512, 64, PAGE_SIZE)
    lengths = _ints(*LENGTHS)
    wrapper.plan(torch.arange(4), INDPTR, PAGES, lengths, *sizes, **options)
    expected = wrapper.run(*rows, *caches)
    wrapper.plan(torch.arange(3), INDPTR[1:], PAGES, lengths[1:], *sizes, **options)
    assert torch.equal(wrapper.run(*[part[1:] for part in rows], *caches), expected[1:])


def test_a_graph_whose_buffers_are_the_engines_own_tables(
    q: torch.Tensor, cache: torch.Tensor
) -> None:
    """AutoDeploy: the first plan is given the buffers, later ones new tensors on the host."""
    expected = _plain(q, cache)
    buffers = [_ints(0, 1, 2, 3), torch.zeros(20, dtype=torch.int32), _ints(1, 1, 1)]
    names = ("indptr", "indices", "last_page_len")
    given = {f"paged_kv_{name}_buffer": b for name, b in zip(names, buffers, strict=True)}
    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), use_cuda_graph=True, use_tensor_cores=True, backend="fa2", **given
    )
    wrapper.plan(*buffers, *COUNTS, q_data_type=BF16, kv_data_type=BF16, sm_scale=None)
    wrapper.run(q, cache, k_scale=1.0, v_scale=1.0, enable_pdl=True)
    surplus = torch.cat([PAGES, _ints(99, -7)])  # after the page numbers in use
    flashinfer.decode.fast_decode_plan(
        *(wrapper, INDPTR, surplus, LAST, *COUNTS),
        **{"q_data_type": BF16, "kv_data_type": BF16, "sm_scale": None},
    )
    assert torch.equal(wrapper.run(q, cache, k_scale=1.0, v_scale=1.0), expected)


def test_buffers_beside_a_prefill_wrapper_without_a_graph(
    q: torch.Tensor, cache: torch.Tensor
) -> None:
    """LightLLM and TensorRT-LLM: buffers, and a workspace of signed bytes."""
    starts, out = _ints(0, 1, 2, 3), torch.empty_like(q)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(torch.int8),
        qo_indptr_buf=starts,
        paged_kv_indptr_buf=INDPTR.clone(),
        paged_kv_indices_buf=torch.empty(500, dtype=torch.int32),
        paged_kv_last_page_len_buf=LAST.clone(),
    )
    options = {"causal": True, "pos_encoding_mode": "NONE", "logits_soft_cap": 0.0}
    types = {"q_data_type": BF16, "kv_data_type": BF16}
    wrapper.plan(starts, INDPTR, PAGES, LAST, *COUNTS, custom_mask=None, **options, **types)
    wrapper.run(q, cache, out=out)
    assert torch.equal(out, _plain(q, cache))


def test_scales_that_are_elements_of_a_tensor(q: torch.Tensor) -> None:
    """LightLLM: a scale per layer, and a cache of bytes that is viewed."""
    scales = torch.tensor([[0.5, 2.0]])
    stored = torch.randn(9, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM).to(FLOAT8).view(torch.uint8)
    cache = stored.view(FLOAT8)
    given = {"k_scale": scales[0][0], "v_scale": scales[0][1]}
    expected = _plain(q, cache, FLOAT8, k_scale=0.5, v_scale=2.0)
    assert torch.equal(_plain(q, cache, FLOAT8, **given), expected)


def test_block_tables_of_pairs_of_caches(q: torch.Tensor) -> None:
    """mini-sglang: both one-call functions, with pairs of NHD caches and a padded table."""
    page_size = 16
    caches = tuple(torch.randn(9, page_size, KV_HEADS, HEAD_DIM, dtype=BF16) for _ in range(2))
    tables, lengths = _ints(4, 0, 7, 8, 5, 1).view(3, 2), _ints(20, 3, 16)
    shared = {
        "query": q,
        "kv_cache": caches,
        "workspace_buffer": _workspace(),
        "block_tables": tables,
        "seq_lens": lengths,
        "bmm1_scale": HEAD_DIM**-0.5,
        "bmm2_scale": 1.0,
        "kv_layout": "NHD",
        "out_dtype": BF16,
    }
    decoded = flashinfer.decode.trtllm_batch_decode_with_kv_cache(max_seq_len=20, **shared)
    prefilled = flashinfer.prefill.trtllm_batch_context_with_kv_cache(
        max_q_len=1,
        max_kv_len=20,
        cum_seq_lens_q=_ints(0, 1, 2, 3),
        cum_seq_lens_kv=_ints(0, 20, 23, 39),
        batch_size=3,
        **shared,
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace())
    sizes = (HEADS, KV_HEADS, HEAD_DIM, page_size)
    wrapper.plan(_ints(0, 2, 3, 4), _ints(4, 0, 7, 5), _ints(4, 3, 16), *sizes, q_data_type=BF16)
    expected = wrapper.run(q, caches)
    assert torch.equal(decoded, expected) and torch.equal(prefilled, expected)
