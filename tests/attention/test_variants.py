"""Users' variants in every wrapper: what a built-in option computes, written as hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.jit.attention import gen_customize_single_prefill_module
from flashinfer.prefill import single_prefill_with_kv_cache_with_jit_module
from tests.attention.batches import (
    BF16,
    Batch,
    indptr,
    need_backend,
    plan_decode,
    plan_paged,
    plan_ragged,
    ragged_kv,
    randn,
    workspace,
)

pytestmark = pytest.mark.gpu

SINKS = """
struct Sinks : AttentionVariantBase {
  float sm_scale_log2;
  template <typename Params>
  __device__ Sinks(const Params& params, uint32_t, uint8_t*) {
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    const float sink = kv_tile_idx == 0 ? params.sink[qo_head_idx] * math::log2e : -math::inf;
    const float largest = fmaxf(m, sink);
    scale = math::ptx_exp2(m - largest);
    d = math::ptx_exp2(sink - largest) + d * scale;
    m = largest;
  })
};
"""
SOFT_CAP = """
struct SoftCap : AttentionVariantBase {
  float sm_scale_log2, scale;
  template <typename Params>
  __device__ SoftCap(const Params& params, uint32_t, uint8_t*) {
    sm_scale_log2 = math::log2e;
    scale = params.logits_scale;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return params.cap * math::tanh(logits * scale / params.cap);
  })
};
"""
BATCH = Batch((1, 40, 0, 300), (700, 40, 5, 300))
DECODE = Batch((1, 1, 1), (3000, 1, 64))


def jit_args(name: str, source: str, tensors: list[str], scalars: list[str]) -> list[Any]:
    types = (["float"] * len(tensors), ["double"] * len(scalars))
    members = [tensors, types[0], scalars, types[1]]
    return [name.lower(), BF16, BF16, BF16, torch.int32, 128, 128, *members, name, source]


WITH_SINKS = jit_args("Sinks", SINKS, ["sink"], [])
WITH_CAP = jit_args("SoftCap", SOFT_CAP, [], ["logits_scale", "cap"])


def same(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=1e-2, rtol=1e-2)


def test_sinks_in_decode(device):
    sinks = randn((8,), torch.float32, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=WITH_SINKS)
    starts, indices, last, _ = DECODE.table()
    wrapper.plan(starts, indices.to(device), last, 8, 2, 128, 16, q_data_type=BF16)
    q, cache = DECODE.query(device), DECODE.cache(device)
    found = wrapper.run(q, cache, sinks, return_lse=True)
    same(found, plan_decode(DECODE, device).run(q, cache, sinks=sinks, return_lse=True))


@pytest.mark.parametrize("causal", [False, True])
def test_sinks_in_paged_prefill(device, causal: bool):
    sinks = randn((8,), torch.float32, device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), jit_args=WITH_SINKS)
    starts, indices, last, _ = BATCH.table()
    table = (indptr(BATCH.qo_lens), starts, indices.to(device), last)
    wrapper.plan(*table, 8, 2, 128, 16, causal=causal, q_data_type=BF16)
    q, cache = BATCH.query(device), BATCH.cache(device)
    found = wrapper.run(q, cache, sinks, return_lse=True)
    built_in = plan_paged(BATCH, device, causal=causal)
    same(found, built_in.run(q, cache, sinks=sinks, return_lse=True))


def test_soft_cap_with_rotation_and_window_in_ragged_prefill(device):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), jit_args=WITH_CAP, jit_kwargs={"pos_encoding_mode": 1}
    )
    starts = (indptr(BATCH.qo_lens), indptr(BATCH.kv_lens))
    wrapper.plan(*starts, 8, 2, 128, causal=True, window_left=100, q_data_type=BF16)
    q, (k, v) = BATCH.query(device), ragged_kv(BATCH, device)
    found = wrapper.run(q, k, v, 0.1, 2.0, return_lse=True)
    built_in = plan_ragged(
        BATCH,
        device,
        causal=True,
        window_left=100,
        sm_scale=0.1,
        logits_soft_cap=2.0,
        pos_encoding_mode="ROPE_LLAMA",
    )
    same(found, built_in.run(q, k, v, return_lse=True))


def test_loaded_module_in_single_prefill(device):
    spec = gen_customize_single_prefill_module("fa2", *WITH_CAP[:4], *WITH_CAP[5:])
    q, k = randn((70, 8, 128), BF16, device), randn((90, 2, 128), BF16, device, 1)
    for mask_mode in (0, 1):
        found = single_prefill_with_kv_cache_with_jit_module(
            *(spec.build_and_load(), q, k, k, 0.1, 2.0), mask_mode=mask_mode, return_lse=True
        )
        expected = flashinfer.single_prefill_with_kv_cache(
            q, k, k, causal=mask_mode == 1, sm_scale=0.1, logits_soft_cap=2.0, return_lse=True
        )
        same(found, expected)


def test_variant_that_owns_the_mask(device):
    """The plan leaves nothing out: what LogitsMask lets through is all that is masked."""
    mask = """
    struct Diagonal : AttentionVariantBase {
      float sm_scale_log2;
      template <typename Params>
      __device__ Diagonal(const Params& params, uint32_t, uint8_t*) {
        sm_scale_log2 = params.sm_scale * math::log2e;
      }
      REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
        return kv_idx == qo_idx + 1;
      })
    };
    """
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device),
        jit_args=jit_args("Diagonal", mask, [], []),
        variant_owns_mask=True,
    )
    rows = torch.tensor([0, 200], dtype=torch.int32)
    wrapper.plan(rows, rows, 8, 2, 128, q_data_type=BF16)
    q, k, v = (randn((200, heads, 128), BF16, device, heads) for heads in (8, 2, 3))
    v = v[:, :2]
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert torch.equal(out[:199], v[1:].repeat_interleave(4, 1))
    assert not out[199].any() and (lse[199] == -torch.inf).all()


@pytest.mark.parametrize("custom", [False, True], ids=["causal", "custom"])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_a_mask_sees_queries_and_tokens_that_exist(backend: str, custom: bool, device):
    """It may read tables by them, also where a tile reaches beyond its request."""
    mask = """
    struct Third : AttentionVariantBase {
      float sm_scale_log2;
      template <typename Params>
      __device__ Third(const Params& params, uint32_t, uint8_t*) {
        sm_scale_log2 = params.sm_scale * math::log2e;
      }
      REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
        const bool exists = qo_idx < params.get_qo_len(batch_idx) &&
                            kv_idx < params.get_kv_len(batch_idx) && qo_head_idx < 8 &&
                            kv_head_idx < 2;
        if (!exists) const_cast<float*>(params.strays)[0] = 1.f;
        return kv_idx % 3 != 0;
      })
    };
    """
    need_backend(backend, device)
    batch = Batch((5, 40, 0, 300, 1), (5, 77, 5, 300, 2))
    masks = [
        torch.ones(n, m).tril(m - n).bool()
        for n, m in zip(batch.qo_lens, batch.kv_lens, strict=True)
    ]
    causal = torch.cat([m.flatten() for m in masks]).to(device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), backend=backend, jit_args=jit_args("Third", mask, ["strays"], [])
    )
    wrapper.plan(
        *(indptr(batch.qo_lens), indptr(batch.kv_lens), 8, 2, 128),
        **({"custom_mask": causal} if custom else {"causal": True}),
        **batch.dtypes(),
    )
    strays = torch.zeros(1, device=device)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    out = wrapper.run(q, k, v, strays)
    shown = torch.cat([(m & (torch.arange(m.shape[1]) % 3 != 0)).flatten() for m in masks])
    same((out,), (plan_ragged(batch, device, custom_mask=shown.to(device)).run(q, k, v),))
    assert strays.item() == 0
