"""Details of the kernel for Hopper alone: tiles of 128 rows, boxes of pages, its schedule.

Masks, options and the wrappers are tested with both kernels, where `backend` is a parameter.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.jit.attention import hopper
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
    plan_paged,
    plan_ragged,
    ragged_kv,
    randn,
    workspace,
)
from tests.attention_plans import layout_of

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 400)
LENGTHS_OF_8_BITS = (1, 31, 95, 96, 97, 191, 192, 193, 287, 288, 400)  # rows by 192, keys by 96


@pytest.fixture(autouse=True)
def hopper_only(device):
    need_backend("fa3", device)


def both(batch: Batch, device: torch.device, **plan: Any) -> None:
    check_paged(plan_paged(batch, device, "fa3", **plan), batch, device)
    check_ragged(plan_ragged(batch, device, "fa3", **plan), batch, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("qk", "vo"), hopper.HEAD_DIMS)
def test_head_dims(qk, vo, dtype, causal, device):
    batch = Batch((129, 0, 40, 1), (300, 70, 0, 515), head_dim_qk=qk, head_dim_vo=vo, dtype=dtype)
    both(batch, device, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("o_dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("qk", "vo"), hopper.HEAD_DIMS)
def test_head_dims_of_8_bits(qk, vo, o_dtype, causal, device):
    batch = Batch(
        *((129, 0, 40, 1), (300, 70, 0, 515)),
        head_dim_qk=qk,
        head_dim_vo=vo,
        dtype=E4M3,
        o_dtype=o_dtype,
    )
    both(batch, device, causal=causal)


@pytest.mark.parametrize("page_size", [128, 384])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_many_items_of_pages_of_a_tile_end(kv_dtype, page_size, device):
    """One box has a whole tile of keys, so that the warp that loads half of the boxes has none."""
    lengths = (150,) * 60, tuple(range(200, 6200, 100))
    batch = Batch(*lengths, page_size=page_size, kv_dtype=kv_dtype)
    wrapper = plan_paged(batch, device, "fa3", causal=True)
    q, cache = batch.query(device), batch.cache(device)
    first = wrapper.run(q, cache)
    assert all(torch.equal(wrapper.run(q, cache), first) for _ in range(50))


@pytest.mark.parametrize(
    "options", [{"window_left": 70}, {"logits_soft_cap": 5.0}, {"causal": True}]
)
@pytest.mark.parametrize("page_size", [1, 8, 16, 24, 64, 96, 128])
def test_pages_and_options_of_8_bits(page_size, options, device):
    batch = Batch((200, 5, 31), (777, 129, 5000), page_size=page_size, dtype=E4M3, o_dtype=BF16)
    scales = {"q_scale": 0.5, "k_scale": 1.5, "v_scale": 3.0}
    check_paged(plan_paged(batch, device, "fa3", **options), batch, device, **scales)


def test_every_value_of_8_bits_comes_from_its_token(device):
    """Each query sees one key: its value is the output, exactly, wherever in a tile it lies."""
    count = 300
    values = torch.arange(count * 128, device=device).view(count, 1, 128) * 7 % 127 - 63
    v = (values / 16).to(E4M3)
    k = torch.zeros_like(v)
    mask = torch.eye(count, dtype=torch.bool, device=device)
    for order in (torch.arange(count), torch.arange(count).flip(0)):
        seen = mask[order.to(device)]
        out = flashinfer.single_prefill_with_kv_cache(k, k, v, custom_mask=seen, o_dtype=FP16)
        assert torch.equal(out.float(), v[order.to(device)].float())


@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("first", "last", "steps"),
    [(0.5, 0.5, 1), (8.0, 0.0, 64), (0.0, 8.0, 64), (64.0, 0.5, 3), (-64.0, -448.0, 2)],
    ids=["equal", "growing", "shrinking", "beyond float32", "negative"],
)
def test_largest_logits_change_from_tile_to_tile(
    first, last, steps, causal, head_dim, dtype, device
):
    """Keys are read from the last to the first; weights are made before their largest is known."""
    count, generator = 1500, torch.Generator(device).manual_seed(7)
    level = torch.arange(count, device=device) * steps // count / max(steps - 1, 1)
    keys = (first + (last - first) * level).to(dtype)[:, None, None]
    k = keys.expand(count, 1, head_dim).contiguous()
    v = torch.randn(count, 1, head_dim, generator=generator, device=device).to(dtype)
    q = torch.ones(count, 2, head_dim, device=device).to(dtype)
    o_dtype = {"o_dtype": BF16} if dtype == E4M3 else {}
    out, lse = flashinfer.single_prefill_with_kv_cache(
        q, k, v, causal=causal, sm_scale=12.8 / head_dim, return_lse=True, backend="fa3", **o_dtype
    )
    logits = (12.8 * k[:, 0, 0].double()).expand(count, count)
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), float("-inf"))
    weights = logits.softmax(1)
    expected = (weights @ v[:, 0].double())[:, None]
    # Weights are rounded, to 8 bits by a sixteenth at most; equal ones alike.
    bound = (0.35 if dtype == E4M3 else 0.05) * (
        weights.square() @ v[:, 0].double().square()
    ).sqrt()[:, None] + 0.01
    assert ((out.double() - expected).abs() <= bound).all()
    expected_lse = logits.logsumexp(1)[:, None].expand_as(lse) / 0.6931471805599453
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(
    ("dtype", "lengths"), [(BF16, LENGTHS), (E4M3, LENGTHS_OF_8_BITS)], ids=["bf16", "8_bits"]
)
def test_lengths_around_the_tiles(dtype, lengths, group, causal, device):
    """Every pair of numbers of packed rows and keys that end just before, at and after a tile."""
    qo = tuple(max(1, n // group) for n in lengths)
    options = {"group": group, "num_kv_heads": 1, "page_size": 32, "dtype": dtype, "o_dtype": BF16}
    for shift in range(len(qo)):
        batch = Batch(qo, lengths[shift:] + lengths[:shift], **options)
        both(batch, device, causal=causal)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 8, 12, 16, 32, 64, 100, 128, 256, 384])
def test_page_sizes(page_size, kv_layout, device):
    """Pages that boxes divide, that divide a tile, and that do neither."""
    for form in ("tuple", "strided"):
        batch = Batch((200, 5), (777, 129), page_size=page_size, kv_layout=kv_layout, form=form)
        check_paged(plan_paged(batch, device, "fa3", causal=True), batch, device)


@pytest.mark.parametrize("disable_split_kv", [False, True])
def test_few_rows_against_many_keys_are_cut(disable_split_kv, device):
    """Parts of two tiles and of many, merged."""
    batch = Batch((100, 3, 31), (5000, 9000, 200), num_kv_heads=1)
    plan = {"causal": True, "disable_split_kv": disable_split_kv}
    wrapper = plan_paged(batch, device, "fa3", **plan)
    assert layout_of(wrapper._executor._planner)["num_merges"] > 0 or disable_split_kv
    check_paged(wrapper, batch, device)


@pytest.mark.parametrize("size", [1, 128, 300])
def test_fixed_splits(size, device):
    batch = Batch((130, 9), (1000, 700), num_kv_heads=1)
    both(batch, device, causal=True, fixed_split_size=size)


def test_more_tiles_than_the_gpu_takes_at_a_time(device):
    """A CTA works off many items, of all lengths, of several heads, some of them empty."""
    count = 300
    qo = tuple((37 * i) % 90 for i in range(count))
    kv = tuple((53 * i) % 400 if i % 7 else 0 for i in range(count))
    batch = Batch(qo, kv, num_kv_heads=3, group=5)
    both(batch, device, causal=True)
    both(batch, device, window_left=100)


@pytest.mark.parametrize("num_kv_heads", [7, 8, 16])
def test_lists_of_8_bits_come_from_some_heads_at_a_time(num_kv_heads, device):
    """167 tiles of 192 rows each: on 132 SMs lists of 7 heads together, or of 4 out of 8 or 16."""
    qo = tuple(10 + (37 * i) % 60 for i in range(110))
    kv = tuple(q + (53 * i) % 300 for i, q in enumerate(qo))
    batch = Batch(qo, kv, num_kv_heads=num_kv_heads, group=5, dtype=E4M3, o_dtype=BF16)
    both(batch, device, causal=True, disable_split_kv=True)


def test_launches_in_a_row_do_not_meet(device):
    """With programmatic launches a kernel begins before the one that writes its queries ends."""
    batch = Batch((200, 60, 7), (900, 60, 2000))
    wrapper = plan_ragged(batch, device, "fa3", causal=True)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    expected = wrapper.run(q, k, v, enable_pdl=False)
    later = torch.empty_like(q)
    for _ in range(20):
        later.fill_(float("nan"))
        later.copy_(q)
        assert torch.equal(wrapper.run(later, k, v, enable_pdl=True), expected)


def test_page_numbers_outside_the_cache_are_not_followed(device):
    """Their tokens count as zeros, whichever way their neighbours come to shared memory."""
    for page_size in (1, 16, 128):
        batch = Batch((150,), (5 * 128,), page_size=page_size, num_kv_heads=1)
        starts, indices, last, num_pages = batch.table()
        q, (k, v) = batch.query(device), batch.cache(device)
        bad = indices.clone()
        bad[len(bad) // 2], bad[0] = num_pages, -1
        outs = []
        for pages, keys, values in (
            (bad, k, v),
            (indices, _without(k, indices, bad), _without(v, indices, bad)),
        ):
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace(device), backend="fa3"
            )
            heads = (batch.num_qo_heads, 1, 128, page_size)
            wrapper.plan(indptr((150,)), starts, pages.to(device), last, *heads, q_data_type=BF16)
            outs.append(wrapper.run(q, (keys, values)))
        assert torch.equal(*outs)


def _without(part: torch.Tensor, indices: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    """The cache with zeros in the pages that the other table does not reach."""
    part = part.clone()
    part[indices[indices != bad].long().to(part.device)] = 0
    return part


@pytest.mark.parametrize(
    ("tokens", "expected"), [((600, 900), "fa3"), ((1, 1), "fa2"), ((1, 700), "fa3")]
)
def test_auto_takes_what_the_rules_say(tokens, expected, device):
    batch = Batch(tokens, tuple(n + 100 for n in tokens))
    wrapper = plan_paged(batch, device, causal=True)
    assert wrapper._executor.config.backend == expected
    check_paged(wrapper, batch, device)


def test_forcing_it_where_it_lacks_something_is_refused(device):
    batch = Batch((40,), (40,))
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    single = flashinfer.single_prefill_with_kv_cache
    with pytest.raises(ValueError, match="`backend`.*ROPE_LLAMA"):
        single(q, k, v, pos_encoding_mode="ROPE_LLAMA", backend="fa3")
    with pytest.raises(ValueError, match="`backend`.*80/80"):
        single(q[..., :80], k[..., :80], v[..., :80], backend="fa3")
    check(single, q=q, k=k, v=v, causal=True, return_lse=True)


def test_queries_of_8_bits_where_hoppers_kernel_does_not_serve_them(device):
    batch = Batch((40,), (40,), dtype=E4M3)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    single = functools.partial(flashinfer.single_prefill_with_kv_cache, o_dtype=BF16)
    portable = {"o_dtype": BF16, "backend": "fa2", "return_lse": True}
    check(flashinfer.single_prefill_with_kv_cache, q=q, k=k, v=v, **portable)
    rotated = {"o_dtype": BF16, "pos_encoding_mode": "ROPE_LLAMA", "return_lse": True}
    check(flashinfer.single_prefill_with_kv_cache, q=q, k=k, v=v, **rotated)
    with pytest.raises(ValueError, match="`kv_data_type`"):
        single(q, k.to(BF16), v.to(BF16))
    with pytest.raises(ValueError, match="`o_data_type`.*float8_e4m3fn"):
        single(q, k, v, o_dtype=None)


def test_both_kernels_agree(device):
    """To the rounding of the weights and of the output."""
    batch = Batch((300, 70), (1000, 333))
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    outs = [
        plan_ragged(batch, device, name, causal=True).run(q, k, v, return_lse=True)
        for name in ("fa2", "fa3")
    ]
    torch.testing.assert_close(outs[0][0].float(), outs[1][0].float(), rtol=0.016, atol=4e-3)
    torch.testing.assert_close(outs[0][1], outs[1][1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "lens", [((150, 40), (300, 257)), ((5, 1, 0, 600, 33), (900, 1, 7, 0, 33))]
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_users_variant(head_dim, lens, device):
    """Hooks on logits and masks are those of the portable kernel."""
    declaration = """
struct Shifted : AttentionVariantBase {
  float sm_scale_log2;
  template <typename Params>
  __device__ Shifted(const Params& params, uint32_t, uint8_t*) {
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits + params.bias[qo_head_idx] * float(kv_idx % 7);
  })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return (qo_idx + kv_idx) % 3 != 0;
  })
};
"""
    batch = Batch(*lens, head_dim_qk=head_dim, head_dim_vo=head_dim)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    bias = randn((batch.num_qo_heads,), torch.float32, device, 3)
    args = ["shifted", BF16, BF16, BF16, torch.int32, head_dim, head_dim]
    args += [["bias"], ["float"], ["sm_scale"], ["double"], "Shifted", declaration]
    outs = []
    for name in ("fa2", "fa3"):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace(device), backend=name, jit_args=args
        )
        lengths = indptr(batch.qo_lens), indptr(batch.kv_lens)
        wrapper.plan(*lengths, 8, 2, head_dim, causal=True, **batch.dtypes())
        outs.append(wrapper.run(q, k, v, bias, head_dim**-0.5, return_lse=True))
    torch.testing.assert_close(outs[0][0].float(), outs[1][0].float(), rtol=0.016, atol=4e-3)
    torch.testing.assert_close(outs[0][1], outs[1][1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kv_len", [40, 64, 65, 128 + 40])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("of_8_bits", [False, True], ids=["bf16", "e4m3"])
def test_an_item_gives_the_same_bits_wherever_it_runs(kv_len, head_dim, of_8_bits, device):
    """The same request many times over: some begin anew in a CTA, most as another one ends."""
    count, qo_len = 300, 32
    dtype = E4M3 if of_8_bits else BF16
    q, k, v = (
        randn((tokens, heads, head_dim), BF16, device, tokens + heads).to(dtype)
        for tokens, heads in ((qo_len, 8), (kv_len, 2), (kv_len, 2))
    )
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend="fa3")
    starts = (indptr([tokens] * count) for tokens in (qo_len, kv_len))
    types = {"q_data_type": dtype, "o_data_type": BF16}
    wrapper.plan(*starts, 8, 2, head_dim, causal=True, disable_split_kv=True, **types)
    out, lse = wrapper.run(*(x.repeat(count, 1, 1) for x in (q, k, v)), return_lse=True)
    for found in (out.view(torch.int16), lse.view(torch.int32)):
        requests = found.unflatten(0, (count, qo_len))
        assert (requests == requests[:1]).all()
