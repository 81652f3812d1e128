"""Scales of each head for quantised queries, keys and values: tensors that stay on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from tests.attention.batches import (
    BF16,
    E4M3,
    FP16,
    Batch,
    check,
    check_paged,
    check_ragged,
    indptr,
    need_backend,
    plan_decode,
    plan_paged,
    plan_ragged,
    ragged_kv,
    workspace,
)
from tests.attention_plans import layout_of

pytestmark = pytest.mark.gpu

NAMES = ("q_scale", "k_scale", "v_scale")
QO, KV = (200, 5, 31), (777, 129, 2000)


def scales(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """Another factor, from 0.5 to 1.5, for each head."""
    counts = (batch.num_qo_heads, batch.num_kv_heads, batch.num_kv_heads)
    return {
        name: 0.5 + torch.arange(count, device=device) * (1 + i) % count / count
        for i, (name, count) in enumerate(zip(NAMES, counts, strict=True))
    }


@pytest.fixture(params=["fa2-bf16", "fa2-e4m3", "fa3-bf16", "fa3-q8"])
def kernel(request: pytest.FixtureRequest, device: torch.device) -> tuple[str, dict[str, Any]]:
    """Backend, and dtypes of its batches."""
    backend, types = request.param.split("-")
    need_backend(backend, device)
    dtypes: dict[str, dict[str, Any]] = {
        "bf16": {},
        "e4m3": {"kv_dtype": E4M3},
        "q8": {"dtype": E4M3, "o_dtype": FP16},
    }
    return backend, dtypes[types]


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 3.0}, {"window_left": 70}])
def test_wrappers(kernel, options, device):
    backend, dtypes = kernel
    batch = Batch(QO, KV, group=3, num_kv_heads=3, **dtypes)
    given = scales(batch, device)
    wrapper = plan_paged(batch, device, backend, causal=True, **options)
    check_paged(wrapper, batch, device, **given)
    check_paged(wrapper, batch, device)
    wrapper = plan_ragged(batch, device, backend, causal=True, **options)
    check_ragged(wrapper, batch, device, **given)
    for name, scale in given.items():
        check_ragged(wrapper, batch, device, **{name: scale})


def test_one_value_and_numbers(kernel, device):
    """A value for all heads on the device, beside numbers of the host; a negative `sm_scale`."""
    backend, dtypes = kernel
    batch = Batch(QO, KV, **dtypes)
    given = scales(batch, device)
    one = torch.full((1,), 0.75, device=device)
    wrapper = plan_ragged(batch, device, backend, causal=True, sm_scale=-0.05)
    check_ragged(wrapper, batch, device, q_scale=one, k_scale=given["k_scale"], v_scale=2.0)
    check_ragged(wrapper, batch, device, q_scale=0.5, k_scale=one[0], v_scale=one)


def test_by_position(kernel, device):
    backend, dtypes = kernel
    batch = Batch((40,), (70,), **dtypes)
    given = scales(batch, device)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    wrapper = plan_ragged(batch, device, backend)
    expected = wrapper.run(q, k, v, **given)
    assert torch.equal(wrapper.run(q, k, v, *given.values()), expected)
    with pytest.raises(TypeError, match="`v_scale`"):
        wrapper.run(q, k, v, given["q_scale"])
    with pytest.raises(TypeError, match="`k_scale`"):
        wrapper.run(q, k, v, *given.values(), k_scale=given["k_scale"])


def test_cut_rows(kernel, device):
    """The merge multiplies by the scales of values."""
    backend, dtypes = kernel
    batch = Batch((100, 3), (5000, 9000), **dtypes)
    wrapper = plan_ragged(batch, device, backend, causal=True)
    assert layout_of(wrapper._executor._planner)["num_merges"] > 0
    check_ragged(wrapper, batch, device, **scales(batch, device))


@pytest.mark.parametrize("mode", ["NONE", "ALIBI"])
def test_single_prefill(kernel, mode, device):
    backend, dtypes = kernel
    batch = Batch((150,), (300,), group=8, **dtypes)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    q_scale, k_scale, v_scale = scales(batch, device).values()
    options = {"o_dtype": FP16, "causal": True, "backend": backend, "pos_encoding_mode": mode}
    call = {"q": q, "k": k, "v": v, **options}
    single = flashinfer.single_prefill_with_kv_cache
    check(single, **call, return_lse=True, scale_q=q_scale, scale_k=k_scale, scale_v=v_scale)
    check(single, **call, return_lse=True, scale_q=2.0, k_scale=k_scale, v_scale=0.5)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_decode(kv_dtype, device):
    batch = Batch((1, 1, 1), (5, 300, 4000), kv_dtype=kv_dtype)
    given = scales(batch, device)
    check_paged(plan_decode(batch, device), batch, device, **given)
    q = batch.query(device)[:1]
    k, v = (part[:300] for part in ragged_kv(batch, device))
    check(flashinfer.single_decode_with_kv_cache, q=q[0], k=k, v=v, return_lse=True, **given)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_batch_attention(kv_dtype, device):
    batch = Batch((1, 100, 1), (500, 300, 4000), kv_dtype=kv_dtype)
    starts, indices, _, _ = batch.table()
    wrapper = flashinfer.BatchAttention(device=str(device))
    wrapper.plan(
        *(indptr(batch.qo_lens), starts, indices.to(device), torch.tensor(batch.kv_lens).int()),
        *(batch.num_qo_heads, batch.num_kv_heads, 128, 128, batch.page_size),
        causal=True,
        q_data_type=batch.dtype,
        kv_data_type=kv_dtype,
    )
    given = scales(batch, device)
    call = {"q": batch.query(device), "kv_cache": batch.cache(device)}
    both = {name: given[name] for name in ("k_scale", "v_scale")}
    check(type(wrapper).run, self=wrapper, **call, **both)


def test_a_graph_reads_them_at_each_replay(kernel, device):
    if device.type != "cuda":
        pytest.skip("captures a CUDA graph")
    backend, dtypes = kernel
    batch = Batch((100,), (300,), **dtypes)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    given = scales(batch, device)
    wrapper = plan_ragged(batch, device, backend, causal=True)
    out = wrapper.run(q, k, v, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, k, v, **given, out=out)
    for scale in given.values():
        scale.mul_(torch.linspace(0.5, 1.5, len(scale), device=device))
    graph.replay()
    assert torch.equal(out, wrapper.run(q, k, v, **given))
    plain = wrapper.run(q, k, v)
    assert torch.equal(plain, wrapper.run(q, k, v, q_scale=1.0)) and not torch.equal(plain, out)


@pytest.mark.parametrize("name", NAMES)
def test_refusals(kernel, name, device):
    backend, dtypes = kernel
    batch = Batch((40,), (70,), **dtypes)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    wrapper = plan_ragged(batch, device, backend)
    scale = scales(batch, device)[name]
    wrong = [scale.int(), scale.repeat(2), scale[:, None], scale.to("meta")]
    if device.type == "cuda":
        wrong.append(scale.cpu())
    for value in wrong:
        with pytest.raises(ValueError, match=f"`{name}`"):
            wrapper.run(q, k, v, **{name: value})
    with pytest.raises(TypeError, match=f"`{name}`"):
        wrapper.run(q, k, v, **{name: "1"})


def test_a_users_variant_has_its_own(device):
    declaration = """
struct Plain : flashinfer::DefaultAttention<false, false, false> {
  using Base = flashinfer::DefaultAttention<false, false, false>;
  using Base::Base;
};
"""
    batch = Batch((40,), (70,))
    args = ["plain_scales", BF16, BF16, BF16, torch.int32, 128, 128]
    args += [[], [], [], [], "Plain", declaration]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), backend="fa2", jit_args=args
    )
    lengths = indptr(batch.qo_lens), indptr(batch.kv_lens)
    wrapper.plan(*lengths, batch.num_qo_heads, batch.num_kv_heads, 128, **batch.dtypes())
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    with pytest.raises(ValueError, match="`jit_args`"):
        wrapper.run(q, k, v, q_scale=scales(batch, device)["q_scale"])
