"""Masks, windows, encodings, soft cap, sinks and items, alone and together, on every path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from tests.attention.batches import (
    BF16,
    E4M3,
    Batch,
    check,
    check_paged,
    check_ragged,
    plan_decode,
    plan_paged,
    plan_ragged,
    randn,
)

QO = (0, 5, 40, 1, 70, 17)
KV = (9, 5, 300, 0, 129, 11)
PREFILL = Batch(QO, KV)
DECODE = Batch((1,) * 5, (0, 1, 64, 700, 33), group=7)

# Options of plan(); "mask" and "sinks" stand for tensors.
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_left": 20},
    "window of one": {"window_left": 0},
    "causal window": {"window_left": 70, "causal": True},
    "soft cap": {"logits_soft_cap": 2.0, "causal": True},
    "alibi": {"pos_encoding_mode": "ALIBI", "causal": True},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA", "causal": True},
    "rope scaled": {
        "pos_encoding_mode": "ROPE_LLAMA",
        "causal": True,
        "rope_scale": 4.0,
        "rope_theta": 5e5,
    },
    "sinks": {"sinks": True, "causal": True},
    "mask": {"mask": True},
    "negative scale": {"sm_scale": -0.1, "causal": True},
    "sharp": {"sm_scale": 0.4, "causal": True},
    "all but mask": {
        "causal": True,
        "window_left": 50,
        "logits_soft_cap": 5.0,
        "pos_encoding_mode": "ALIBI",
        "sinks": True,
    },
    "mask and all": {
        "mask": True,
        "window_left": 100,
        "logits_soft_cap": 5.0,
        "pos_encoding_mode": "ROPE_LLAMA",
        "sinks": True,
    },
}
WITHOUT_MASK = {name: o for name, o in OPTIONS.items() if "mask" not in o}


def random_mask(batch: Batch, device: torch.device) -> torch.Tensor:
    """Bools of each request after the other; some queries see nothing."""
    sizes = [q * k for q, k in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    mask = randn((sum(sizes),), torch.float32, device, 5) > 0.3
    start = 0
    for size, kv_len in zip(sizes, batch.kv_lens, strict=True):
        mask[start : start + min(size, kv_len)] = False  # the first query of each
        start += size
    return mask


def split(batch: Batch, options: dict[str, Any], device: torch.device) -> tuple[dict, dict]:
    """Arguments of plan() and of run()."""
    plan = {name: value for name, value in options.items() if name not in ("mask", "sinks")}
    if options.get("mask"):
        plan["custom_mask"] = random_mask(batch, device)
    run = {}
    if options.get("sinks"):
        run["sinks"] = randn((batch.num_qo_heads,), torch.float32, device, 6) * 3
    return plan, run


def lacks_rotation(backend: str, plan: dict[str, Any], make: Callable[..., Any]) -> bool:
    """Whether options are refused because the kernel does not rotate."""
    if backend != "fa3" or plan.get("pos_encoding_mode") != "ROPE_LLAMA":
        return False
    with pytest.raises(ValueError, match="`backend`.*ROPE_LLAMA"):
        make(**plan)
    return True


@pytest.mark.parametrize("name", OPTIONS)
def test_paged(name, backend, device):
    plan, run = split(PREFILL, OPTIONS[name], device)
    make = functools.partial(plan_paged, PREFILL, device, backend)
    if not lacks_rotation(backend, plan, make):
        check_paged(make(**plan), PREFILL, device, **run)


@pytest.mark.parametrize("name", ["causal window", "mask", "rope", "all but mask"])
def test_ragged(name, backend, device):
    plan, _ = split(PREFILL, OPTIONS[name], device)
    make = functools.partial(plan_ragged, PREFILL, device, backend)
    if not lacks_rotation(backend, plan, make):
        check_ragged(make(**plan), PREFILL, device)


@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_decode(name, device):
    options = {key: value for key, value in OPTIONS[name].items() if key != "causal"}
    plan, run = split(DECODE, options, device)
    check_paged(plan_decode(DECODE, device, **plan), DECODE, device, **run)


@pytest.mark.parametrize("name", ["mask", "soft cap", "rope", "window"])
def test_single(name, backend, device):
    if name == "rope" and backend == "fa3":
        pytest.skip("the kernel for Hopper does not rotate")
    options = dict(OPTIONS[name])
    q = randn((33, 6, 64), BF16, device, 1)
    k, v = randn((2, 90, 2, 64), BF16, device, 2)
    if options.pop("mask", False):
        options["custom_mask"] = randn((33, 90), torch.float32, device, 3) > 0
    options["backend"] = backend
    check(flashinfer.single_prefill_with_kv_cache, q=q, k=k, v=v, return_lse=True, **options)


@pytest.mark.parametrize("name", ["soft cap", "rope", "window", "alibi"])
def test_single_decode(name, device):
    options = {key: value for key, value in OPTIONS[name].items() if key != "causal"}
    q = randn((6, 64), BF16, device, 1)
    k, v = randn((2, 90, 2, 64), BF16, device, 2)
    check(flashinfer.single_decode_with_kv_cache, q=q, k=k, v=v, return_lse=True, **options)


def shown_keys(name: str, qo_len: int, kv_len: int) -> torch.Tensor:
    """A mask of one request, bools ``[qo_len, kv_len]``."""
    key, position = torch.arange(kv_len), torch.arange(qo_len).view(-1, 1) + kv_len - qo_len
    if name == "tree":  # guesses after a prefix, each sees its ancestors
        seen = (key < kv_len - qo_len) | (key == position)
        for query in range(1, qo_len):
            seen[query] |= seen[(query - 1) // 3]
        return seen
    seen = key <= position
    if name == "band":
        seen &= key > position - 150
    if name == "few":  # most tiles of keys, and the last queries, see nothing
        seen = (key >= 130) & (key < 140) & (position < kv_len - qo_len // 3)
    return seen


@pytest.mark.parametrize("name", ["lower triangle", "band", "tree", "few"])
def test_keys_that_no_query_sees_are_left_out(name, backend, device):
    """Tiles of keys before the first and after the last that a tile of queries sees."""
    batch = Batch((200, 64, 1), (700, 1500, 300))
    masks = [shown_keys(name, *lens) for lens in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    mask = torch.cat([mask.flatten() for mask in masks]).to(device)
    check_paged(plan_paged(batch, device, backend, custom_mask=mask), batch, device)


def test_packed_mask_is_the_bool_mask(backend, device):
    mask = random_mask(PREFILL, device)
    sizes = [q * k for q, k in zip(QO, KV, strict=True)]
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)
    packed, _ = flashinfer.segment_packbits(mask, starts, bitorder="little")
    q, cache = PREFILL.query(device), PREFILL.cache(device)
    by_bool = plan_paged(PREFILL, device, backend, custom_mask=mask).run_return_lse(q, cache)
    by_bits = plan_paged(PREFILL, device, backend, packed_custom_mask=packed).run_return_lse(
        q, cache
    )
    assert all(torch.equal(a, b) for a, b in zip(by_bool, by_bits, strict=True))
    assert by_bool[1].isinf().any(), "some query sees nothing"


def test_single_packed_mask_is_the_bool_mask(device):
    q, k, v = randn((3, 50, 2, 64), BF16, device, 1)
    mask = randn((50, 50), torch.float32, device, 3) > 0
    packed = flashinfer.packbits(mask.flatten(), bitorder="little")
    function = flashinfer.single_prefill_with_kv_cache
    by_bool = function(q, k, v, custom_mask=mask)
    assert torch.equal(function(q, k, v, packed_custom_mask=packed), by_bool)


def test_a_mask_takes_the_place_of_causal(backend, device):
    everything = torch.ones(sum(q * k for q, k in zip(QO, KV, strict=True)), device=device).bool()
    q, cache = PREFILL.query(device), PREFILL.cache(device)
    masked = plan_paged(PREFILL, device, backend, custom_mask=everything, causal=True).run(q, cache)
    expected = plan_paged(PREFILL, device, backend).run(q, cache)
    torch.testing.assert_close(masked, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("planned", [-1, 100])
def test_window_of_run_narrows_that_of_plan(planned, device):
    wrapper = plan_decode(DECODE, device, window_left=planned)
    check_paged(wrapper, DECODE, device, window_left=30)
    expected = plan_decode(DECODE, device, window_left=30)
    arguments = DECODE.query(device), DECODE.cache(device)
    got = wrapper.run(*arguments, window_left=30)
    torch.testing.assert_close(got, expected.run(*arguments), rtol=0.02, atol=0.02)


def test_sinks_without_keys_hold_the_whole_sum(device):
    sinks = torch.linspace(-3, 3, DECODE.num_qo_heads, device=device)
    wrapper = plan_decode(DECODE, device)
    out, lse = wrapper.run_return_lse(DECODE.query(device), DECODE.cache(device), sinks=sinks)
    assert out[0].eq(0).all()
    torch.testing.assert_close(lse[0], sinks * 1.4426950408889634, rtol=1e-5, atol=1e-5)


def test_a_sink_far_below_changes_nothing(device):
    wrapper = plan_decode(DECODE, device)
    q, cache = DECODE.query(device), DECODE.cache(device)
    sinks = torch.full((DECODE.num_qo_heads,), -1e4, device=device)
    out, lse = wrapper.run_return_lse(q, cache, sinks=sinks)
    expected, expected_lse = wrapper.run_return_lse(q, cache)
    torch.testing.assert_close(out[1:], expected[1:], rtol=0.01, atol=1e-3)
    torch.testing.assert_close(lse[1:], expected_lse[1:], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"window_left": 30}], ids=["plain", "window"])
@pytest.mark.parametrize("cached", [0, 20])
def test_items_after_a_prefix(cached, options, backend, device):
    """Items of 3, 7 and 30 tokens after prefixes of 40 and 33; `cached` keys are not queried."""
    items = [0, 1, 2, 3, 0, *range(1, 8), 0, *range(1, 31), 0]
    prefixes = (40, 33)
    kv_lens = tuple(p + len(items) for p in prefixes)
    batch = Batch(tuple(n - cached for n in kv_lens), kv_lens)
    wrapper = plan_paged(
        batch,
        device,
        backend,
        causal=True,
        prefix_len_ptr=torch.tensor(prefixes, device=device).to(torch.uint32),
        token_pos_in_items_ptr=torch.tensor(items * 2, device=device).to(torch.uint16),
        token_pos_in_items_len=len(items),
        max_item_len_ptr=torch.tensor([30, 30], device=device).to(torch.uint16),
        **options,
    )
    check_paged(wrapper, batch, device)


@pytest.mark.parametrize("name", ["causal window", "soft cap", "alibi", "sinks", "mask"])
def test_with_8_bit_keys(name, device):
    batch = Batch(QO, KV, kv_dtype=E4M3)
    plan, run = split(batch, OPTIONS[name], device)
    check_paged(plan_paged(batch, device, **plan), batch, device, k_scale=0.5, v_scale=2.0, **run)


def test_long_positions_of_rotary_embedding(device):
    """At position 60,000 an angle in float32 would be off by thousandths."""
    batch = Batch((3, 1), (60000, 20), group=1, num_kv_heads=1)
    wrapper = plan_paged(batch, device, causal=True, pos_encoding_mode="ROPE_LLAMA")
    check_paged(wrapper, batch, device)
