"""Queries of 8 bits: portable prefill and decode, wrappers for decode on Hopper's kernel, e5m2."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.jit.attention import hopper
from tests.attention.batches import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    Batch,
    check_paged,
    check_ragged,
    indptr,
    need_backend,
    plan_decode,
    plan_paged,
    plan_ragged,
    workspace,
)
from tests.attention.calls import make_call
from tests.attention.test_sparse import check_bsr, plan_bsr

LENGTHS = (0, 1, 63, 64, 65, 700, 16, 0)
PAIRS = [(E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2), (E5M2, E4M3)]
NAMES = ["e4m3", "e5m2", "e4m3-e5m2", "e5m2-e4m3"]


def _decode(**changes) -> Batch:
    fields = {"qo_lens": (1,) * len(LENGTHS), "kv_lens": LENGTHS, "dtype": E4M3, "o_dtype": BF16}
    return Batch(**{**fields, **changes})


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS, ids=NAMES)
@pytest.mark.parametrize("o_dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_decode(dtype, kv_dtype, o_dtype, device):
    batch = _decode(dtype=dtype, kv_dtype=kv_dtype, o_dtype=o_dtype)
    wrapper = plan_decode(batch, device)
    check_paged(wrapper, batch, device)
    check_paged(wrapper, batch, device, q_scale=1.5, k_scale=0.5, v_scale=-2.5)


@pytest.mark.parametrize("group", [1, 5, 8, 16])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_decode_of_groups_and_pages(group, page_size, device):
    batch = _decode(group=group, page_size=page_size, kv_layout="HND")
    check_paged(plan_decode(batch, device), batch, device)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 256, 512])
def test_decode_of_head_dims(head_dim, device):
    batch = _decode(head_dim_qk=head_dim, head_dim_vo=head_dim)
    check_paged(plan_decode(batch, device), batch, device)


@pytest.mark.parametrize("count", [1, 8], ids=["one", "heads"])
def test_decode_with_scales_on_the_device(count, device):
    batch = _decode()
    scales = {"q_scale": count, "k_scale": min(count, 2), "v_scale": min(count, 2)}
    tensors = {
        name: torch.linspace(0.5, 1.5, n, dtype=torch.float32, device=device)
        for name, n in scales.items()
    }
    check_paged(plan_decode(batch, device), batch, device, **tensors)


@pytest.mark.parametrize("options", [{"window_left": 30}, {"logits_soft_cap": 5.0}])
def test_decode_of_several_queries_with_options(options, device):
    batch = Batch((3,) * 4, (3, 64, 200, 3), dtype=E4M3, o_dtype=BF16)
    check_paged(plan_decode(batch, device, q_len_per_req=3, **options), batch, device)


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS[:3], ids=NAMES[:3])
@pytest.mark.parametrize("qo_lens", [(20, 3, 0), (200, 5, 31)], ids=["short", "long"])
def test_prefill_of_the_portable_kernel(qo_lens, dtype, kv_dtype, device):
    batch = Batch(qo_lens, (300, 129, 70), dtype=dtype, kv_dtype=kv_dtype, o_dtype=BF16)
    check_paged(plan_paged(batch, device, "fa2", causal=True), batch, device)
    check_ragged(plan_ragged(batch, device, "fa2"), batch, device)


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS[1:], ids=NAMES[1:])
@pytest.mark.parametrize(("qk", "vo"), hopper.HEAD_DIMS)
def test_prefill_on_hopper(qk, vo, dtype, kv_dtype, device):
    need_backend("fa3", device)
    fields = {"head_dim_qk": qk, "head_dim_vo": vo, "dtype": dtype, "kv_dtype": kv_dtype}
    batch = Batch((129, 0, 40, 1), (300, 70, 0, 515), **fields, o_dtype=BF16)
    check_paged(plan_paged(batch, device, "fa3", causal=True), batch, device)


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS, ids=NAMES)
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_mixed_batches(head_dim, dtype, kv_dtype, backend, device):
    sizes = {"head_dim_qk": head_dim, "head_dim_vo": head_dim}
    types = {"dtype": dtype, "kv_dtype": kv_dtype, "o_dtype": BF16}
    batch = Batch((130, 1, 1, 5), (200, 300, 64, 5), **sizes, **types)
    if backend == "fa3" and head_dim == 512:
        backend = "auto"
    call = make_call("mixed", batch, device, causal=True).with_make(backend=backend)
    call.check()
    heads = torch.linspace(0.5, 1.5, batch.num_qo_heads, device=device)
    call.with_run(q_scale=heads, k_scale=0.5, v_scale=torch.ones(1, device=device) / 3).check()
    with pytest.raises(ValueError, match="`o_data_type`"):
        call.with_plan(o_data_type=None).make_it()


def test_sinks(device):
    batch = Batch((20, 3, 0), (300, 129, 70), dtype=E4M3, o_dtype=BF16)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace(device), q_data_type=E4M3, kv_data_type=E4M3
    )
    starts, indices, last, _ = batch.table()
    table = (indptr(batch.qo_lens), starts, indices.to(device), last)
    wrapper.plan(*table, 8, 2, 128, 16, causal=True, **batch.dtypes())
    sinks = torch.linspace(-2.0, 3.0, 8, device=device)
    check_paged(wrapper, batch, device, sinks=sinks, q_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_decode_on_hoppers_kernel(dtype, tokens, device):
    need_backend("fa3", device)
    batch = Batch((tokens,) * 4, (3, 64, 700, 65), dtype=dtype, o_dtype=BF16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend="fa3")
    starts, indices, last, _ = batch.table()
    table = (starts, indices.to(device), last)
    wrapper.plan(*table, 8, 2, 128, 16, q_len_per_req=tokens, **batch.dtypes())
    check_paged(wrapper, batch, device)


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS[:3], ids=NAMES[:3])
def test_block_sparse(dtype, kv_dtype, backend, device):
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "o_dtype": BF16, "backend": backend}
    wrapper, tensors = plan_bsr((64, 256, 16, 16), device, **options)
    check_bsr(wrapper, tensors)
    heads = torch.tensor([0.5, 1.5], device=device)
    one = torch.tensor([0.25], device=device)
    check_bsr(wrapper, {**tensors, "scale_q": one, "scale_k": heads, "scale_v": heads})
    planned, _ = plan_bsr((64, 256, 16, 16), device, **options, q_scale=one, v_scale=heads)
    check_bsr(planned, tensors)


def test_an_output_of_8_bits_is_refused(device):
    with pytest.raises(ValueError, match="`o_data_type`"):
        plan_decode(_decode(o_dtype=None), device)
