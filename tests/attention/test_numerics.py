"""How far from exact, how large the logits may be, and what must be equal bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashinfer
from flashinfer.trace.template import resolve_template
from tests.attention.batches import (
    BF16,
    E4M3,
    FP16,
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

LOG2E = 1.4426950408889634


def plan_hopper(batch: Batch, device: torch.device, **options: Any) -> Any:
    need_backend("fa3", device)
    return plan_paged(batch, device, "fa3", **options)


PLANS = {"decode": plan_decode, "prefill": plan_paged, "hopper": plan_hopper}


def _exact(wrapper, **run) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {"self": wrapper, "return_lse": True, **run}
    template = resolve_template(type(wrapper).run.__flashinfer_trace__, arguments)
    assert template is not None
    return template.compute(arguments)


def _sdpa(q, k, v, causal: bool) -> torch.Tensor:
    """PyTorch's attention of one request in the dtype of its arguments."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=causal)[0].transpose(0, 1)


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [64, 512, 2048])
def test_error_is_at_most_twice_that_of_pytorch(length, causal, spread, kv_dtype, backend, device):
    batch = Batch((length,), (length,), group=2, num_kv_heads=1, kv_dtype=kv_dtype)
    if device.type == "cpu" and length > 512:
        pytest.skip("large for the reference on a CPU")
    q, (k, v) = batch.query(device) * spread, ragged_kv(batch, device)
    wrapper = plan_ragged(batch, device, backend, causal=causal)
    exact, _ = _exact(wrapper, q=q, k=k, v=v)
    ours = wrapper.run(q, k, v).double() - exact
    theirs = _sdpa(q, k.to(q.dtype), v.to(q.dtype), causal).double() - exact
    assert _rms(ours) <= 2 * _rms(theirs)
    assert ours.abs().max() <= 2 * theirs.abs().max()


def test_decode_error_is_at_most_twice_that_of_pytorch(device):
    batch = Batch((1,), (3000,), num_kv_heads=2, page_size=1)
    wrapper = plan_decode(batch, device)
    q, cache = batch.query(device), batch.cache(device)
    order = batch.table()[1].long().to(device)
    exact, _ = _exact(wrapper, q=q, paged_kv_cache=cache)
    ours = wrapper.run(q, cache).double() - exact
    theirs = _sdpa(q, *(part[order, 0] for part in cache), False).double() - exact
    assert _rms(ours) <= 2 * _rms(theirs)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("path", PLANS)
def test_logits_of_a_million(path, sign, dtype, device):
    """One key wins by far, or all lose alike; nothing overflows."""
    lengths = (1, 65, 700)
    qo = (1, 1, 1) if path == "decode" else (1, 65, 40)
    batch = Batch(qo, lengths, dtype=dtype)
    q = batch.query(device)
    # |q.k| reaches about 50 here.
    scale = sign * 2e4
    wrapper = PLANS[path](batch, device, sm_scale=scale)
    cache = batch.cache(device)
    out, lse = wrapper.run(q, cache, return_lse=True)
    exact, exact_lse = _exact(wrapper, q=q, paged_kv_cache=cache)
    assert exact_lse.abs().max() > 1e6 and out.isfinite().all()
    # Two keys within a float32 unit of each other may trade places, which is rare.
    close = (out.double() - exact).abs() <= 0.02 + 0.02 * exact.abs()
    assert close.double().mean() > 0.98
    # A product is summed in 128 / 16 steps, each cut to 24 bits of a partial sum, which is at most
    # the product of the norms. Relative are the roundings of log2(e), the scale, the logit and LSE.
    longest = torch.nan_to_num(cache[0]).double().norm(dim=-1).max()
    of_products = 8 * 2.0**-23 * q.double().norm(dim=-1) * longest
    allowed = abs(scale) * LOG2E * of_products + 4 * 2.0**-24 * exact_lse.abs()
    assert ((lse.double() - exact_lse).abs() <= allowed).all()


@pytest.mark.parametrize("value", [1e6, -1e6])
def test_equal_logits_of_a_million_average_the_values(value, device):
    """All logits the same: weights of one over the length, to the last bit of the sum."""
    length = 256
    q = torch.full((1, 8, 64), 1.0, dtype=BF16, device=device)
    k = torch.full((length, 2, 64), 1.0, dtype=BF16, device=device)
    v = randn((length, 2, 64), BF16, device)
    batch = Batch((1,), (length,), head_dim_qk=64, head_dim_vo=64)
    wrapper = plan_ragged(batch, device, sm_scale=value / 64)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    expected = v.double().mean(0).repeat_interleave(4, 0)[None]
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=2e-3)
    expected_lse = value * LOG2E + 8
    torch.testing.assert_close(lse, torch.full_like(lse, expected_lse), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["bf16", "e4m3"])
def test_large_queries_against_small_keys(kv_dtype, device):
    """Magnitudes far from one, up to what bfloat16 holds and float16 does not."""
    batch = Batch((1, 1), (40, 500), kv_dtype=kv_dtype)
    wrapper = plan_decode(batch, device, sm_scale=2.0**-30)
    q, cache = batch.query(device) * 2.0**27, batch.cache(device)
    out, lse = wrapper.run(q, cache, return_lse=True)
    exact, exact_lse = _exact(wrapper, q=q, paged_kv_cache=cache)
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=2e-3)


def test_a_row_that_is_masked_gives_zero_and_minus_infinity(backend, device):
    batch = Batch((4, 70), (300, 64))
    masks = [torch.ones(q, k, dtype=torch.bool) for q, k in zip((4, 70), (300, 64), strict=True)]
    masks[0][2], masks[1][::7] = False, False
    mask = torch.cat([m.flatten() for m in masks]).to(device)
    wrapper = plan_paged(batch, device, backend, custom_mask=mask)
    out, lse = wrapper.run(batch.query(device), batch.cache(device), return_lse=True)
    hidden = torch.cat([~m.any(1) for m in masks]).to(device)
    assert out[hidden].eq(0).all() and lse[hidden].eq(float("-inf")).all()
    assert lse[~hidden].isfinite().all() and out.isfinite().all()


@pytest.mark.parametrize("page_size", [1, 16])
def test_parts_merge_to_the_whole(page_size, device):
    """Attention over halves of the keys, merged by merge_state, is attention over all."""
    whole = Batch((1,) * 3, (640, 128, 1024), page_size=page_size)
    starts, indices, last, _ = whole.table()
    q, cache = whole.query(device), whole.cache(device)
    expected, expected_lse = plan_decode(whole, device).run(q, cache, return_lse=True)
    counts = starts.diff()
    first = counts // 3
    states = []
    for begin, count in ((starts[:-1], first), (starts[:-1] + first, counts - first)):
        pages = [indices[b : b + n] for b, n in zip(begin.tolist(), count.tolist(), strict=True)]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(
            *(indptr(count.tolist()), torch.cat(pages).to(device)),
            *(torch.full_like(last, page_size), 8, 2, 128, page_size),
            q_data_type=BF16,
        )
        states.append(wrapper.run(q, cache, return_lse=True))
    merged, lse = flashinfer.merge_state(*states[0], *states[1])
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    # 1e-3 of the state's size, and the rounding of three bfloat16 outputs.
    torch.testing.assert_close(merged.float(), expected.float(), rtol=0.016, atol=2e-3)


@pytest.mark.parametrize("fixed_split_size", [64, 128, 1000, 4096])
def test_split_and_unsplit_agree(fixed_split_size, device):
    batch = Batch((1, 1, 1), (5000, 64, 1))
    q, cache = batch.query(device), batch.cache(device)
    whole = plan_decode(batch, device, disable_split_kv=True).run(q, cache, return_lse=True)
    wrapper = plan_decode(batch, device, fixed_split_size=fixed_split_size)
    parts = wrapper.run(q, cache, return_lse=True)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(parts[0].float(), whole[0].float(), rtol=0.008, atol=1e-3)


@pytest.mark.parametrize("of_8_bits", [False, True], ids=["", "8_bits"])
@pytest.mark.parametrize("path", PLANS)
def test_repeats_are_equal_bit_for_bit(path, of_8_bits, device, full):
    lengths = (3000, 17, 600, 0, 64)
    qo = (1,) * 5 if path == "decode" else (30, 17, 1, 5, 64)
    dtypes = {"dtype": E4M3, "o_dtype": BF16} if of_8_bits else {}
    batch = Batch(qo, lengths, **dtypes)
    wrapper = PLANS[path](batch, device)
    q, cache = batch.query(device), batch.cache(device)
    out, lse = wrapper.run(q, cache, return_lse=True)
    again, again_lse = torch.empty_like(out), torch.empty_like(lse)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(10_000 if full else 3 if device.type == "cpu" else 100):
        again.fill_(float("nan"))
        again_lse.fill_(float("nan"))
        wrapper.run(q, cache, out=again, lse=again_lse, return_lse=True)
        bits = (again.view(torch.int16) != out.view(torch.int16)).any()
        different += bits | (again_lse.view(torch.int32) != lse.view(torch.int32)).any()
    assert int(different) == 0


Requests = list[tuple[int, int, torch.Tensor]]  # queries, keys and pages of each


def _check_alone_and_in_batches(
    run: Callable[[Requests], list[torch.Tensor]], qo_lens: range, one: Batch, rounds: int
) -> None:
    """`run` gives the output of each request; that of `one` is the same in every batch."""
    rng = random.Random(7)
    _, table, _, num_pages = one.table()
    mine = (one.qo_lens[0], one.kv_lens[0], table)
    (alone,) = run([mine])
    for _ in range(rounds):
        others = []
        for _ in range(rng.randrange(1, 12)):
            kv_len = rng.randrange(1, 1700)
            chosen = torch.randint(0, num_pages, (-(-kv_len // 16),), dtype=torch.int32)
            others.append((rng.choice(qo_lens), kv_len, chosen))
        place = rng.randrange(len(others) + 1)
        together = run([*others[:place], mine, *others[place:]])
        assert torch.equal(together[place], alone)


def _table(requests: Requests, device: torch.device) -> tuple[torch.Tensor, ...]:
    counts = [len(pages) for _, _, pages in requests]
    last = [kv - (n - 1) * 16 for (_, kv, _), n in zip(requests, counts, strict=True)]
    pages = torch.cat([pages for _, _, pages in requests])
    return indptr(counts), pages.to(device), torch.tensor(last, dtype=torch.int32)


def _queries(requests: Requests, device: torch.device) -> torch.Tensor:
    return torch.cat([randn((n, 8, 128), BF16, device, 100 + kv) for n, kv, _ in requests])


SPLITS = [{"fixed_split_size": 256}, {"fixed_split_size": 256, "disable_split_kv": True}]


@pytest.mark.parametrize("splits", SPLITS, ids=["cut", "whole"])
@pytest.mark.parametrize("qo_len", [1, 5, 300])
def test_a_request_alone_and_in_random_batches(qo_len, splits, backend, device, full):
    """With a fixed split, a request's result does not depend on its neighbours, bit for bit."""
    one = Batch((qo_len,), (1777,), seed=4)
    cache = one.cache(device)

    def run(requests: Requests) -> list[torch.Tensor]:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
        qo_lens = [n for n, _, _ in requests]
        table = (indptr(qo_lens), *_table(requests, device))
        wrapper.plan(*table, 8, 2, 128, 16, causal=True, q_data_type=BF16, **splits)
        return list(wrapper.run(_queries(requests, device), cache).split(qo_lens))

    rounds = 500 if full else 3 if device.type == "cpu" else 20
    _check_alone_and_in_batches(run, range(1, 40), one, rounds)


@pytest.mark.parametrize("splits", SPLITS, ids=["cut", "whole"])
def test_a_decoding_request_alone_and_in_random_batches(splits, device, full):
    one = Batch((1,), (1777,), seed=4)
    cache = one.cache(device)

    def run(requests: Requests) -> list[torch.Tensor]:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(*_table(requests, device), 8, 2, 128, 16, q_data_type=BF16, **splits)
        return list(wrapper.run(_queries(requests, device), cache).split(1))

    rounds = 500 if full else 3 if device.type == "cpu" else 20
    _check_alone_and_in_batches(run, range(1, 2), one, rounds)
