"""Properties of paged appends that random calls do not single out."""

from __future__ import annotations

import pytest
import torch

import flashinfer


def _i32(values, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_positions_count_back_from_the_end_of_each_request(device):
    append_indptr, seq_lens = _i32([0, 1, 3, 6, 10], device), _i32([5, 5, 5, 5], device)
    batch, position = flashinfer.get_batch_indices_positions(append_indptr, seq_lens, 12)
    assert batch.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, -1, -1]
    assert position.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4, 0, 0]


@pytest.mark.parametrize("batch_size", [1, 2047, 2048, 5000])
def test_batch_indices_of_many_requests(batch_size, device):
    """Beyond 2047 requests the bounds do not fit the kernel's shared memory."""
    added = torch.randint(0, 3, (batch_size,))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), added.cumsum(0)])
    seq_lens = added + torch.randint(0, 100, (batch_size,))
    nnz = int(indptr[-1]) + 3
    batch, position = flashinfer.get_batch_indices_positions(
        indptr.int().to(device), seq_lens.int().to(device), nnz
    )
    expected = torch.arange(batch_size).repeat_interleave(added)
    tokens = torch.arange(nnz - 3)
    assert torch.equal(batch.cpu()[:-3], expected.int()) and batch[-3:].eq(-1).all()
    wanted = seq_lens[expected] - indptr[expected + 1] + tokens
    assert torch.equal(position.cpu()[:-3], wanted.int())


def test_seq_lens(device):
    indptr, last = _i32([0, 2, 2, 3], device), _i32([4, 0, 16], device)
    assert flashinfer.get_seq_lens(indptr, last, 16).tolist() == [20, 0, 16]
    assert flashinfer.get_seq_lens(_i32([0], device), last[:0], 16).shape == (0,)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_only_the_slots_of_the_tokens_are_written(kv_layout, device):
    inner = (4, 3) if kv_layout == "NHD" else (3, 4)
    cache = torch.full((6, 2, *inner, 8), -1.0, device=device)
    key, value = torch.rand(2, 5, 3, 8, device=device)
    # Request 0 is at positions 3 and 4 of pages 5, 2; request 1 at 0; the rest leads nowhere.
    batch, position = _i32([0, 0, 1, -1, 9], device), _i32([3, 4, 0, 0, 0], device)
    table = _i32([5, 2, 0], device), _i32([0, 2, 3], device), _i32([1, 1], device)
    flashinfer.append_paged_kv_cache(key, value, batch, position, cache, *table, kv_layout)
    by_slot = cache if kv_layout == "NHD" else cache.transpose(2, 3)
    for token, (page, slot) in enumerate([(5, 3), (2, 0), (0, 0)]):
        assert torch.equal(by_slot[page, 0, slot], key[token])
        assert torch.equal(by_slot[page, 1, slot], value[token])
        by_slot[page, :, slot] = -1.0
    assert cache.eq(-1.0).all()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("fused", [False, True])
def test_tokens_in_place_of_pages_of_one(fused, kv_layout, device):
    """[tokens, heads, head_dim], as engines with pages of one token keep it."""
    tokens = torch.zeros(7, 2, 3, 8, device=device)
    key, value = torch.rand(2, 3, 3, 8, device=device)
    batch, position = _i32([0, 0, 1], device), _i32([0, 1, 0], device)
    table = _i32([5, 2, 0], device), _i32([0, 2, 3], device), _i32([1, 1], device)
    cache = tokens if fused else tuple(tokens.unbind(1))
    flashinfer.append_paged_kv_cache(key, value, batch, position, cache, *table, kv_layout)
    assert torch.equal(tokens[[5, 2, 0]], torch.stack([key, value], 1))
    assert not tokens[[1, 3, 4, 6]].any()


def test_columns_of_one_latent_cache(device):
    cache = torch.zeros(3, 4, 48, device=device)
    ckv, kpe = torch.rand(2, 32, device=device), torch.rand(2, 16, device=device)
    where = _i32([0, 0], device), _i32([3, 4], device)
    table = _i32([2, 1], device), _i32([0, 2], device), _i32([1], device)
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, *where, cache[..., :32], cache[..., 32:], *table)
    assert torch.equal(cache[2, 3], torch.cat([ckv, kpe], -1)[0])
    assert torch.equal(cache[1, 0], torch.cat([ckv, kpe], -1)[1])


@pytest.mark.gpu
def test_cache_of_more_than_2_to_the_32_elements():
    """The last page lies beyond any 32-bit offset."""
    page_size, heads, dim = 16, 8, 128
    pages = 2**32 // (2 * page_size * heads * dim) + 3
    cache = torch.empty(pages, 2, page_size, heads, dim, dtype=torch.uint8, device="cuda")
    cache[-1] = 0
    key, value = torch.randint(1, 255, (2, 2, heads, dim), dtype=torch.uint8, device="cuda")
    device = torch.device("cuda")
    where = _i32([0, 0], device), _i32([0, 15], device)
    table = _i32([pages - 1], device), _i32([0, 1], device), _i32([16], device)
    flashinfer.append_paged_kv_cache(key, value, *where, cache, *table)
    for slot, token in ((0, 0), (15, 1)):
        assert torch.equal(cache[-1, 0, slot], key[token])
        assert torch.equal(cache[-1, 1, slot], value[token])
    assert not cache[-1, :, 1:15].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 120, 60])
def test_append_beyond_l2(dim):
    """So many tokens that those to come are brought to L2: whole pages, in any order."""
    pages, page_size, heads = 1200, 16, 8
    device = torch.device("cuda")
    key, value = torch.randn(2, pages * page_size, heads, dim, device=device)
    cache = torch.empty(pages, 2, page_size, heads, dim, device=device)
    order = torch.randperm(pages, device=device)
    position = torch.arange(pages * page_size, device=device, dtype=torch.int32)
    table = order.int(), _i32([0, pages], device), _i32([page_size], device)
    flashinfer.append_paged_kv_cache(
        key, value, torch.zeros_like(position), position, cache, *table
    )
    for part, appended in enumerate((key, value)):
        assert torch.equal(cache[order, part].flatten(0, 1), appended)
