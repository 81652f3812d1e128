"""The kernel for Hopper with 16-bit queries and 8-bit keys, which it widens in shared memory."""

from __future__ import annotations

from typing import Any

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
    check,
    check_paged,
    check_ragged,
    need_backend,
    plan_paged,
    plan_ragged,
    ragged_kv,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper_only(device):
    need_backend("fa3", device)


def both(batch: Batch, device: torch.device, **plan: Any) -> None:
    check_paged(plan_paged(batch, device, "fa3", **plan), batch, device)
    check_ragged(plan_ragged(batch, device, "fa3", **plan), batch, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("qk", "vo"), hopper.HEAD_DIMS)
def test_head_dims_of_8_bit_keys(qk, vo, dtype, kv_dtype, causal, device):
    lengths = (129, 0, 40, 1), (300, 70, 0, 515)
    batch = Batch(*lengths, head_dim_qk=qk, head_dim_vo=vo, dtype=dtype, kv_dtype=kv_dtype)
    both(batch, device, causal=causal)


@pytest.mark.parametrize("form", ["tuple", "strided"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 24, 100, 128, 384])
def test_pages_of_8_bit_keys(page_size, kv_layout, form, device):
    lengths = (200, 5, 31), (777, 129, 2000)
    batch = Batch(*lengths, page_size=page_size, kv_layout=kv_layout, form=form, kv_dtype=E4M3)
    scales = {"q_scale": 0.5, "k_scale": 1.5, "v_scale": 3.0}
    check_paged(plan_paged(batch, device, "fa3", causal=True), batch, device, **scales)


@pytest.mark.parametrize(
    "options",
    [{"window_left": 70}, {"logits_soft_cap": 5.0}, {"fixed_split_size": 300}, {"causal": True}],
)
@pytest.mark.parametrize("group", [1, 5, 8])
def test_options_of_8_bit_keys(group, options, device):
    """Groups that do not divide a tile: their queries are copied by threads."""
    batch = Batch((200, 5, 31), (777, 129, 5000), group=group, kv_dtype=E4M3)
    both(batch, device, **options)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_value_of_8_bits_is_widened_exactly(dtype, kv_dtype, device):
    """Each query sees one key, whose value is the output: all 256, NaN and infinities included."""
    codes = torch.arange(256, device=device).to(torch.uint8)
    v = torch.stack([codes.roll(i) for i in range(128)], 1).view(kv_dtype)
    q = torch.zeros(256, 1, 128, dtype=dtype, device=device)
    k = torch.zeros_like(q).to(kv_dtype)
    for token in (0, 77, 255):  # the others' weights are zero, and zero times NaN is NaN
        alone = v[token : token + 1, None].contiguous()
        out = flashinfer.single_prefill_with_kv_cache(q, k[:1], alone, backend="fa3")
        expected = alone.to(dtype).expand_as(out)
        assert torch.equal(out.nan_to_num(777.0), expected.nan_to_num(777.0))


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("exponent", [-90, -20, 20, 90])
def test_queries_of_any_magnitude_over_8_bit_keys(exponent, soft_cap, device):
    """bfloat16 queries become float16, which has less range, so each row has its own factor."""
    batch = Batch((150,), (300,), dtype=BF16, kv_dtype=E5M2)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    rows = torch.arange(150, device=device).view(-1, 1, 1) % 3
    q = (q.float() * 2.0 ** (exponent - rows)).to(BF16)
    q[..., ::2] *= 2.0**-12
    options = {"sm_scale": 128**-0.5 * 2.0**-exponent, "logits_soft_cap": soft_cap, "causal": True}
    check(flashinfer.single_prefill_with_kv_cache, q=q, k=k, v=v, backend="fa3", **options)


def test_keys_that_are_nan_are_seen(device):
    """An 8-bit NaN becomes a 16-bit NaN, in the rows that see it and in no others."""
    batch = Batch((150,), (150,), num_kv_heads=1, kv_dtype=E4M3)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    k.view(torch.uint8)[100, 0, 7] = 0xFF
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, backend="fa3")
    assert not out[:100].isnan().any() and out[100:].isnan().all()
