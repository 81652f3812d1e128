"""Memory after a request's last key is another's, or nobody's: whatever it holds, no bit changes.

The kernel for Hopper loads whole KV tiles where it can, and must not use what it loads too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import flashinfer
from tests.attention.batches import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    Batch,
    check_paged,
    check_ragged,
    need_backend,
    plan_paged,
    plan_ragged,
    ragged_kv,
    randn,
)

pytestmark = pytest.mark.gpu

# Around tiles of 64, 96 and 128 keys; each but the last is followed by a request of poison.
LENGTHS = (1, 31, 63, 65, 95, 97, 127, 128, 129, 136, 255, 257, 1000, 7)
KV_LENS = tuple(n for length in LENGTHS for n in (length, 40))[:-1]
BATCH = {"qo_lens": tuple(min(n, 70) for n in KV_LENS), "kv_lens": KV_LENS}
TYPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": FP16},
    "e4m3": {"dtype": E4M3, "o_dtype": BF16},
    "e4m3 keys": {"kv_dtype": E4M3},
    "e5m2 keys": {"dtype": FP16, "kv_dtype": E5M2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "cut": {"fixed_split_size": 300},
    "soft cap": {"logits_soft_cap": 5.0},
}
POISONS = [float("nan"), float("inf")]

by_type = pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
by_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
by_poison = pytest.mark.parametrize("poison", POISONS)


@pytest.fixture(autouse=True)
def hopper_only(device):
    need_backend("fa3", device)


def as_stored(poison: float, dtype: torch.dtype) -> float:
    """E4m3 has no infinity."""
    return float("nan") if dtype == E4M3 else poison


def starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def poisoned_rows(batch: Batch, values: torch.Tensor, poison: float) -> torch.Tensor:
    """Ragged rows in which every second request's are `poison`, and what follows the last, too."""
    poison = as_stored(poison, values.dtype)
    larger = values.new_full((len(values) + 130, *values.shape[1:]), 0.0, dtype=torch.float32)
    larger[: len(values)] = values.float()
    larger[len(values) :] = poison
    for start, count in list(zip(starts(batch.kv_lens), batch.kv_lens, strict=True))[1::2]:
        larger[start : start + count] = poison
    return larger.to(values.dtype)[: len(values)]


def poisoned_pages(batch: Batch, values: torch.Tensor, poison: float) -> torch.Tensor:
    """The same for pages, whose slots after a request's end hold `poison` as well."""
    poison = as_stored(poison, values.dtype)
    pages = values.float()
    pages[pages.isnan()] = poison
    first, indices, *_ = batch.table()
    for b in range(1, len(batch.kv_lens), 2):
        pages[indices[first[b] : first[b + 1]].long().to(pages.device)] = poison
    return pages.to(values.dtype)


def assert_same_but_poison(batch: Batch, found: Any, expected: Any) -> None:
    """Bit for bit in the other requests."""
    for request, (start, count) in enumerate(
        zip(starts(batch.qo_lens), batch.qo_lens, strict=True)
    ):
        rows = slice(start, start + count)
        if request % 2 == 1:
            assert found[0][rows].isnan().all(), "the poison is none"
            continue
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x[rows], y[rows]), f"request of {batch.kv_lens[request]} keys"


def check_neighbours_of_rows(batch: Batch, device: torch.device, poison: float, **plan: Any):
    wrapper = plan_ragged(batch, device, "fa3", **plan)
    q, kv = batch.query(device), ragged_kv(batch, device)
    expected = wrapper.run(q, *kv, return_lse=True)
    found = wrapper.run(q, *(poisoned_rows(batch, x, poison) for x in kv), return_lse=True)
    assert_same_but_poison(batch, found, expected)
    check_ragged(wrapper, batch, device)


def check_neighbours_in_pages(batch: Batch, device: torch.device, poison: float, **plan: Any):
    wrapper = plan_paged(batch, device, "fa3", **plan)
    q, cache = batch.query(device), batch.cache(device)
    clean = tuple(part.float().nan_to_num(0.0).to(part.dtype) for part in cache)
    expected = wrapper.run(q, clean, return_lse=True)
    poisoned = tuple(poisoned_pages(batch, part, poison) for part in cache)
    assert_same_but_poison(batch, wrapper.run(q, poisoned, return_lse=True), expected)
    check_paged(wrapper, batch, device)


@by_poison
@by_option
@by_type
def test_neighbours_of_ragged_keys(types, options, poison, device):
    check_neighbours_of_rows(Batch(**BATCH, **types), device, poison, **options)


@by_poison
@pytest.mark.parametrize("page_size", [8, 16, 64, 384])
@by_option
@by_type
def test_neighbours_in_pages(types, options, page_size, poison, device):
    check_neighbours_in_pages(
        Batch(**BATCH, page_size=page_size, **types), device, poison, **options
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("qk", "vo"), [(64, 64), (96, 96), (192, 128), (256, 256)])
@by_type
def test_neighbours_of_other_heads(types, qk, vo, causal, device):
    """Tiles of other sizes, and columns that fill no whole line of shared memory."""
    batch = Batch(**BATCH, head_dim_qk=qk, head_dim_vo=vo, page_size=32, **types)
    for poison in POISONS:
        check_neighbours_of_rows(batch, device, poison, causal=causal)
        check_neighbours_in_pages(batch, device, poison, causal=causal)


@pytest.mark.parametrize("group", [3, 5])
@by_type
def test_neighbours_where_threads_copy_queries(types, group, device):
    """Their copies are under way when the boxes are asked for."""
    batch = Batch(**BATCH, group=group, **types)
    check_neighbours_of_rows(batch, device, float("nan"), causal=True)
    check_neighbours_in_pages(batch, device, float("nan"), causal=True)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_len", [1, 127, 129, 1000, 5001])
@by_type
def test_behind_the_end_of_one_request(types, kv_len, kv_layout, device):
    """Of keys that are the first of a longer tensor: few queries, so that 5001 keys are cut."""
    batch = Batch((20,), (kv_len,), **types)
    q, kv = batch.query(device), ragged_kv(batch, device)
    options = {"backend": "fa3", "return_lse": True, "o_dtype": batch.o_dtype}
    single = flashinfer.single_prefill_with_kv_cache
    expected = single(q, *kv, **options)
    for poison in POISONS:
        k, v = (poisoned_rows(batch, x, poison) for x in kv)
        if kv_layout == "HND":  # the same rows, for each head after the other's poison
            k, v = (
                x.as_strided((kv_len + 130, *x.shape[1:]), x.stride())
                .transpose(0, 1)
                .contiguous()[:, :kv_len]
                for x in (k, v)
            )
        found = single(q, k, v, kv_layout=kv_layout, **options)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@by_type
def test_many_short_requests(types, device):
    """A CTA takes one after the other, each with keys to clear, and its rings go round."""
    count = 301
    lengths = tuple(1 + (37 * i) % 135 for i in range(count))
    batch = Batch(lengths, lengths, group=2, **types)
    check_neighbours_of_rows(batch, device, float("nan"), causal=True)
    check_neighbours_in_pages(batch, device, float("nan"), causal=True)


def test_keys_of_zeros_behind_the_end_weigh_nothing(device):
    """All logits negative: zeros where the copy engine finds no tensor would be the largest."""
    q = randn((64, 4, 128), BF16, device).abs()
    k = -randn((200, 1, 128), BF16, device, 1).abs()
    v = randn((200, 1, 128), BF16, device, 2)
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, backend="fa3")
    logits = torch.einsum("qhd,kd->hqk", q.double(), k[:, 0].double()) * 128**-0.5
    expected = torch.einsum("hqk,kd->qhd", logits.softmax(-1), v[:, 0].double())
    torch.testing.assert_close(out.double(), expected, rtol=0.016, atol=4e-3)
