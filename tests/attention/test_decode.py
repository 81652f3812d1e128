"""Decode over paged caches: shapes, layouts, element types, and what a call writes."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashinfer
from tests.attention.batches import (
    BF16,
    E4M3,
    E5M2,
    FORMS,
    FP16,
    Batch,
    check,
    check_paged,
    need_backend,
    plan_decode,
    plan_paged,
    randn,
    workspace,
)

LENGTHS = (0, 1, 63, 64, 65, 700, 16, 0)
ONE_EACH = (1,) * len(LENGTHS)
USUAL = Batch(ONE_EACH, LENGTHS)


def _batch(**changes) -> Batch:
    return Batch(**{"qo_lens": ONE_EACH, "kv_lens": LENGTHS, **changes})


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_group_sizes_of_one_small_tile(group, num_kv_heads, device):
    batch = _batch(group=group, num_kv_heads=num_kv_heads)
    check_paged(plan_decode(batch, device), batch, device)


@pytest.mark.parametrize("group", [17, 24, 32, 48, 63, 64])
def test_group_sizes_of_larger_tiles(group, device):
    batch = _batch(group=group, num_kv_heads=1)
    check_paged(plan_decode(batch, device), batch, device)


@pytest.mark.parametrize(
    ("page_size", "form"), [*itertools.product([1, 3, 5, 16, 64], FORMS), (1, "tokens")]
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_caches(page_size, kv_layout, form, device):
    batch = _batch(page_size=page_size, kv_layout=kv_layout, form=form, group=7)
    check_paged(plan_decode(batch, device), batch, device)


def _head_dims(full: bool) -> list[int]:
    return [*range(16, 257, 16), 320, 448, 512] if full else [16, 48, 64, 96, 176, 256, 448, 512]


@pytest.mark.parametrize("head_dim", [*range(16, 257, 16), 320, 448, 512])
def test_head_dims(head_dim, device, full):
    if head_dim not in _head_dims(full):
        pytest.skip("this head size under --full")
    batch = _batch(head_dim_qk=head_dim, head_dim_vo=head_dim)
    check_paged(plan_decode(batch, device), batch, device)


# Two warps share the columns of 8 rows; with 272 columns, and with 16 rows, they do not.
@pytest.mark.parametrize("group", [1, 7, 8, 16])
@pytest.mark.parametrize("heads", [(448, 448), (512, 512), (512, 128), (272, 256)], ids=str)
def test_large_heads(heads, group, device):
    sizes = {"head_dim_qk": heads[0], "head_dim_vo": heads[1]}
    batch = _batch(group=group, page_size=5, **sizes)
    check_paged(plan_paged(batch, device, causal=True), batch, device)


@pytest.mark.parametrize("head_dim", [448, 512])
@pytest.mark.parametrize("dtypes", [(BF16, E4M3), (FP16, FP16), (E4M3, E4M3)], ids=str)
def test_large_heads_of_other_types(dtypes, head_dim, device):
    sizes = {"head_dim_qk": head_dim, "head_dim_vo": head_dim, "o_dtype": BF16}
    batch = _batch(dtype=dtypes[0], kv_dtype=dtypes[1], kv_layout="HND", **sizes)
    check_paged(plan_decode(batch, device), batch, device)


@pytest.mark.parametrize(
    "options",
    [{"pos_encoding_mode": "ROPE_LLAMA"}, {"window_left": 100}, {"logits_soft_cap": 5.0}],
    ids=str,
)
def test_large_heads_with_options(options, device):
    batch = Batch((2,) * 4, (2, 64, 700, 65), head_dim_qk=512, head_dim_vo=512)
    wrapper = plan_decode(batch, device, q_len_per_req=2, **options)
    check_paged(wrapper, batch, device)


@pytest.mark.parametrize("kv_dtype", [None, E4M3, E5M2], ids=["same", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_dtypes_and_scales(dtype, kv_dtype, device):
    batch = _batch(dtype=dtype, kv_dtype=kv_dtype)
    wrapper = plan_decode(batch, device, sm_scale=0.2)
    check_paged(wrapper, batch, device)
    check_paged(wrapper, batch, device, q_scale=1.5, k_scale=0.5, v_scale=-2.5)


def test_output_of_another_dtype(device):
    wrapper = plan_decode(USUAL, device, o_data_type=FP16)
    assert check_paged(wrapper, USUAL, device)["output"].dtype == FP16


@pytest.mark.parametrize("group", [4, 7])
def test_several_queries_per_request_are_causal(group, device):
    batch = Batch((3,) * 4, (3, 64, 200, 2), group=group)
    wrapper = plan_decode(batch, device, q_len_per_req=3)
    check_paged(wrapper, batch, device)


def test_int64_tables_are_converted(device):
    starts, indices, last, _ = USUAL.table()
    wrapper = plan_decode(USUAL, device)
    expected = wrapper.run(USUAL.query(device), USUAL.cache(device))
    again = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    again.plan(
        *(starts.long(), indices.long().to(device), last.long(), 8, 2, 128, 16),
        q_data_type=BF16,
    )
    assert torch.equal(again.run(USUAL.query(device), USUAL.cache(device)), expected)


@pytest.mark.gpu
def test_tables_on_the_gpu_give_the_same(device):
    starts, indices, last, _ = USUAL.table()
    expected = plan_decode(USUAL, device).run(USUAL.query(device), USUAL.cache(device))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        *(starts.to(device), indices.to(device), last.to(device), 8, 2, 128, 16), q_data_type=BF16
    )
    assert torch.equal(wrapper.run(USUAL.query(device), USUAL.cache(device)), expected)


def test_out_and_lse_receive_the_results(device):
    wrapper = plan_decode(USUAL, device)
    q, cache = USUAL.query(device), USUAL.cache(device)
    expected, expected_lse = wrapper.run(q, cache, return_lse=True)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device=device)
    got = wrapper.run(q, cache, out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert torch.equal(wrapper.run(q, cache), expected)
    assert torch.equal(wrapper.run_return_lse(q, cache)[1], expected_lse)


def test_strided_queries_and_output(device):
    q = randn((len(LENGTHS), 3, 8, 128), BF16, device)[:, 1]
    out = torch.empty(len(LENGTHS), 8, 2, 128, dtype=BF16, device=device)[:, :, 1]
    wrapper = plan_decode(USUAL, device)
    arguments = {"q": q, "paged_kv_cache": USUAL.cache(device), "out": out}
    check(type(wrapper).run, self=wrapper, return_lse=True, **arguments)


def test_requests_without_keys_give_zero_and_minus_infinity(device):
    batch = Batch((1, 1, 1), (0, 5, 0))
    out, lse = plan_decode(batch, device).run_return_lse(batch.query(device), batch.cache(device))
    assert out[::2].eq(0).all() and lse[::2].eq(float("-inf")).all()
    empty = Batch((1, 1), (0, 0))
    out, lse = plan_decode(empty, device).run_return_lse(empty.query(device), empty.cache(device))
    assert out.eq(0).all() and lse.eq(float("-inf")).all()


def test_empty_batch(device):
    batch = Batch((), ())
    out, lse = plan_decode(batch, device).run_return_lse(batch.query(device), batch.cache(device))
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8)


def test_planning_again_serves_another_batch(device):
    wrapper = plan_decode(USUAL, device)
    for lengths in ((5, 900), (0,), (33,) * 40):
        batch = Batch((1,) * len(lengths), lengths, seed=len(lengths))
        starts, indices, last, _ = batch.table()
        wrapper.plan(starts, indices.to(device), last, 8, 2, 128, 16, q_data_type=BF16)
        check_paged(wrapper, batch, device)


@pytest.mark.parametrize("use_tensor_cores", [False, True])
def test_one_request_much_longer_than_the_others(use_tensor_cores, device):
    lengths = (64, 4096, 64, 60, 3)
    batch = Batch((1,) * 5, lengths)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), use_tensor_cores=use_tensor_cores
    )
    starts, indices, last, _ = batch.table()
    wrapper.plan(starts, indices.to(device), last, 8, 2, 128, 16, data_type=BF16)
    check_paged(wrapper, batch, device)


@pytest.mark.parametrize("page_size", [16, 64, 1])
@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["bf16", "e4m3"])
def test_long_requests_that_are_not_cut(kv_dtype, page_size, device):
    """Pages are looked up while the tile before them is multiplied."""
    lengths = (2048, 2049, 4200, 9000, 1984)
    batch = Batch((1,) * len(lengths), lengths, kv_dtype=kv_dtype, page_size=page_size)
    check_paged(plan_decode(batch, device, disable_split_kv=True), batch, device)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_len", [1, 64, 1000])
def test_single_decode(kv_len, kv_layout, device):
    q = randn((8, 128), BF16, device, 1)
    k, v = randn((2, kv_len, 2, 128), BF16, device, 2)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    arguments = {"q": q, "k": k, "v": v, "kv_layout": kv_layout}
    function = flashinfer.single_decode_with_kv_cache
    check(function, return_lse=True, **arguments)
    check(function, k_scale=2.0, v_scale=0.5, sm_scale=0.05, **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_rows_that_do_not_begin_at_16_bytes_are_refused(name, device):
    wrapper, q, cache = plan_decode(USUAL, device), USUAL.query(device), USUAL.cache(device)
    tensors = {"q": q, "k": cache[0], "v": cache[1], "out": torch.empty_like(q)}
    old = tensors[name]
    moved = torch.zeros(old.numel() + 4, dtype=old.dtype, device=device)[4:].view(old.shape)
    tensors[name] = moved.copy_(old)
    with pytest.raises(ValueError, match=f"16|{name}"):
        wrapper.run(tensors["q"], (tensors["k"], tensors["v"]), out=tensors["out"])


@pytest.mark.gpu
def test_pages_beyond_four_billion_elements(device):
    """Page number times stride does not fit 32 bits, neither in bytes nor in elements."""
    stride = 2**20
    num_pages = 2**32 // stride + 3
    if torch.cuda.mem_get_info()[0] < num_pages * stride + 2**32:
        pytest.skip("needs 9 GB of free GPU memory")
    batch = Batch((1, 1), (40, 33), kv_dtype=E4M3)
    starts, indices, last, few = batch.table()
    near = batch.cache(device)
    expected = plan_decode(batch, device).run(batch.query(device), near)
    storage = torch.empty(num_pages * stride, dtype=torch.uint8, device=device).view(E4M3)
    shape = (num_pages, 16, 2, 128)
    k = storage.as_strided(shape, (stride, 256, 128, 1))
    v = storage.as_strided(shape, (stride, 256, 128, 1), 8192)
    moved = (indices.long() + num_pages - few).to(torch.int32).to(device)
    for far, part in zip((k, v), near, strict=True):
        far[num_pages - few :].copy_(part)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(starts, moved, last, 8, 2, 128, 16, q_data_type=BF16, kv_data_type=E4M3)
    assert torch.equal(wrapper.run(batch.query(device), (k, v)), expected)


def test_forward_is_an_older_name_of_plan_and_run(device):
    expected = plan_decode(USUAL, device).run(USUAL.query(device), USUAL.cache(device))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    starts, indices, last, _ = USUAL.table()
    wrapper.begin_forward(starts, indices.to(device), last, 8, 2, 128, 16, data_type=BF16)
    assert torch.equal(wrapper.forward(USUAL.query(device), USUAL.cache(device)), expected)
    wrapper.end_forward()


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("window_left", [-1, 20])
def test_a_part_of_a_page_table(backend: str, window_left: int, device: torch.device):
    """Offsets of the last requests only, which begin after the pages of the others."""
    need_backend(backend, device)
    lengths, page_size = (130, 1, 64, 700, 16), 16
    counts = [-(-length // page_size) for length in lengths]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    order = torch.randperm(70, generator=torch.Generator().manual_seed(5))
    pages = order[: sum(counts)].int().to(device)
    last = torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32)
    q = randn((5, 8, 128), BF16, device, 1)
    cache = tuple(randn((70, page_size, 2, 128), BF16, device, seed) for seed in (2, 3))
    options = {"window_left": window_left, "q_data_type": BF16}
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend="fa2")
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
    results = []
    for first in (0, 2):
        table = (starts[first:], pages, last[first:], 8, 2, 128, page_size)
        decode.plan(*table, **options)
        prefill.plan(torch.arange(6 - first).int(), *table, causal=True, **options)
        results.append([wrapper.run(q[first:], cache) for wrapper in (decode, prefill)])
    # How a batch is divided depends on its requests: the last bits may differ.
    for whole, part in zip(*results, strict=True):
        torch.testing.assert_close(part.float(), whole[2:].float(), rtol=0.01, atol=0.01)
