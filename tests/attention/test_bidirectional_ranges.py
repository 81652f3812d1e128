"""Causal prefill with ranges that are seen in both directions, against masks in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.jit.attention import gen_batch_prefill_bidirectional_ranges_module
from tests.attention.batches import BF16, E4M3, FP16, Batch, indptr, workspace
from tests.bodies import body_of

pytestmark = pytest.mark.any_device
Wrapper = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper

# Whole prompts, parts of prompts, decode, a request without queries and one without keys.
MIXED = Batch((40, 70, 1, 0, 130), (40, 200, 33, 20, 130), head_dim_qk=64, head_dim_vo=64)


def _wrapper(batch: Batch, device: torch.device, **options: Any) -> Any:
    return Wrapper(
        workspace(device),
        batch.kv_layout,
        **batch.dtypes(),
        head_dim_qk=batch.head_dim_qk,
        head_dim_vo=batch.head_dim_vo,
        **options,
    )


def _plan(wrapper: Any, batch: Batch, device: torch.device, **options: Any) -> None:
    starts, pages, last, _ = batch.table()
    rows, heads = indptr(batch.qo_lens), (batch.num_qo_heads, batch.num_kv_heads)
    table = (rows, starts, pages.to(device), last)
    wrapper.plan(*table, *heads, batch.head_dim_qk, batch.page_size, **options)


def _ranges(batch: Batch, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Images at random places: the ranges that a serving engine makes of them."""
    torch.manual_seed(seed)
    rows = torch.full((sum(batch.qo_lens), 2), -1, dtype=torch.int32)
    begin = 0
    for qo_len, kv_len in zip(batch.qo_lens, batch.kv_lens, strict=True):
        of_keys, key = torch.full((kv_len, 2), -1, dtype=torch.int32), 0
        while key < kv_len:
            size = int(torch.randint(1, 40, ()))
            if torch.rand(()) < 0.6:
                of_keys[key : key + size] = torch.tensor([key, min(key + size, kv_len) - 1])
            key += size
        rows[begin : begin + qo_len] = of_keys[kv_len - qo_len :]
        begin += qo_len
    return rows.to(device)


def _anything(batch: Batch, device: torch.device) -> torch.Tensor:
    """Ranges that overlap, are empty, lie before or after the query, or beyond the keys."""
    torch.manual_seed(5)
    first = torch.randint(-20, 220, (sum(batch.qo_lens), 1), dtype=torch.int32)
    length = torch.randint(-3, 60, first.shape, dtype=torch.int32)
    return torch.cat([first, first + length], 1).to(device)


def _rows(batch: Batch, cache: Any) -> list[list[torch.Tensor]]:
    """Keys and values of each request, in float64 on the host."""
    starts, pages, _, _ = batch.table()
    parts = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
    found = []
    for part in parts:
        by_slot = part if batch.kv_layout == "NHD" else part.transpose(1, 2)
        own = (pages[starts[b] : starts[b + 1]].long() for b in range(len(batch.kv_lens)))
        host = by_slot.cpu().double()
        found.append([host[p].flatten(0, 1)[:n] for p, n in zip(own, batch.kv_lens, strict=True)])
    return found


def _expected(
    batch: Batch, q: torch.Tensor, cache: Any, ranges: torch.Tensor, windows: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-2 log-sum-exp; the mask is filled in query by query."""
    keys, values = _rows(batch, cache)
    outputs, sums, begin = [], [], 0
    for b, (qo_len, kv_len) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True)):
        mask = torch.zeros(qo_len, kv_len, dtype=torch.bool)
        for i in range(qo_len):
            position = kv_len - qo_len + i
            first, final = ranges[begin + i].tolist()
            window, within = (position - w if w >= 0 else 0 for w in windows)
            mask[i, max(window, 0) : position + 1] = True
            mask[i, max(first, within, 0) : max(final + 1, 0)] = True
        k, v = (rows[b].repeat_interleave(batch.group, 1) for rows in (keys, values))
        rows = q[begin : begin + qo_len].cpu().double()
        logits = torch.einsum("qhd,khd->qhk", rows, k) / batch.head_dim_qk**0.5
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
        weights = logits.softmax(-1).nan_to_num(0.0)
        outputs.append(torch.einsum("qhk,khd->qhd", weights, v))
        sums.append(logits.logsumexp(-1) / torch.log(torch.tensor(2.0)).double())
        begin += qo_len
    return torch.cat(outputs), torch.cat(sums)


def _check(wrapper: Any, batch: Batch, device: torch.device, ranges, windows=(-1, -1)) -> None:
    q, cache = batch.query(device), batch.cache(device)
    out = q.new_full((*q.shape[:2], batch.head_dim_vo), float("nan"), dtype=batch.o_dtype)
    lse = torch.full(q.shape[:2], float("nan"), device=device)
    found = wrapper.run(q, cache, ranges, *windows, out=out, lse=lse, return_lse=True)
    assert found[0] is out and found[1] is lse
    expected = _expected(batch, q, cache, ranges, windows)
    torch.testing.assert_close(out.cpu().double(), expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.cpu().double(), expected[1], atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("windows", [(-1, -1), (30, -1), (-1, 5), (25, 0), (0, 60)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_images_in_prompts(seed, windows, dtype, device):
    batch = Batch(**{**vars(MIXED), "dtype": dtype, "seed": seed + 1})
    wrapper = _wrapper(batch, device)
    _plan(wrapper, batch, device)
    _check(wrapper, batch, device, _ranges(batch, device, seed), windows)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("windows", [(-1, -1), (12, 30)], ids=str)
@pytest.mark.parametrize("form", ["tuple", "fused", "strided"])
def test_any_range(form, windows, kv_layout, device):
    batch = Batch(**{**vars(MIXED), "form": form, "kv_layout": kv_layout, "page_size": 3})
    wrapper = _wrapper(batch, device)
    _plan(wrapper, batch, device)
    _check(wrapper, batch, device, _anything(batch, device), windows)


@pytest.mark.parametrize(
    "options",
    [{"fixed_split_size": 64}, {"disable_split_kv": True}, {"sm_scale": 64**-0.5}],
    ids=str,
)
def test_options_of_plans(options, device):
    wrapper = _wrapper(MIXED, device)
    _plan(wrapper, MIXED, device, **options)
    _check(wrapper, MIXED, device, _ranges(MIXED, device))


def test_heads_of_two_sizes_and_8_bits(device):
    for changes in (
        {"head_dim_qk": 192, "head_dim_vo": 128},
        {"kv_dtype": E4M3, "head_dim_qk": 128, "head_dim_vo": 128, "group": 1},
        {"o_dtype": FP16},
    ):
        batch = Batch(**{**vars(MIXED), **changes})
        wrapper = _wrapper(batch, device)
        _plan(wrapper, batch, device, head_dim_vo=batch.head_dim_vo)
        _check(wrapper, batch, device, _ranges(batch, device))


def test_borders(device):
    """Ranges of a whole request, of one token, and of the first and the last; and no ranges."""
    batch = Batch((50, 50), (50, 90), head_dim_qk=64, head_dim_vo=64)
    wrapper = _wrapper(batch, device)
    _plan(wrapper, batch, device)
    none = torch.full((100, 2), -1, dtype=torch.int32, device=device)
    for row, (first, final) in enumerate([(0, 49), (0, 0), (49, 49), (7, 6), (0, 99)]):
        ranges = none.clone()
        ranges[row : 100 - row] = torch.tensor([first, final], device=device)
        _check(wrapper, batch, device, ranges)
    _check(wrapper, batch, device, none)
    causal = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    starts, pages, last, _ = batch.table()
    table = (indptr(batch.qo_lens), starts, pages.to(device), last)
    causal.plan(*table, 8, 2, 64, 16, causal=True, q_data_type=BF16)
    q, cache = batch.query(device), batch.cache(device)
    ordinary = causal.run(q, cache)
    torch.testing.assert_close(wrapper.run(q, cache, none), ordinary, atol=1e-2, rtol=1e-2)


def test_a_prompt_in_parts(device):
    """The queries are a suffix of the keys: part by part the result is that of the whole."""
    whole = Batch((120,), (120,), head_dim_qk=64, head_dim_vo=64)
    wrapper = _wrapper(whole, device)
    _plan(wrapper, whole, device)
    ranges = torch.full((120, 2), -1, dtype=torch.int32, device=device)
    for begin, end in ((10, 30), (30, 45), (70, 110)):
        ranges[begin:end] = torch.tensor([begin, end - 1], device=device)
    q, cache = whole.query(device), whole.cache(device)
    expected = wrapper.run(q, cache, ranges)
    starts, pages, _, _ = whole.table()
    for begin, end in ((0, 45), (45, 70), (70, 111), (111, 120)):  # no image is cut
        count = -(-end // 16)
        last = torch.tensor([end - 16 * (count - 1)], dtype=torch.int32)
        table = (indptr([end - begin]), indptr([count]), pages[:count].to(device), last)
        wrapper.plan(*table, 8, 2, 64, 16)
        part = wrapper.run(q[begin:end], cache, ranges[begin:end].contiguous())
        torch.testing.assert_close(part, expected[begin:end], atol=1e-2, rtol=1e-2)


def test_rotation(device):
    """Rotated in the kernel, or before; a plan that says nothing takes the wrapper's."""
    batch = Batch((30,), (50,), head_dim_qk=64, head_dim_vo=64, num_kv_heads=1)
    ranges = _ranges(batch, device)
    q, (k, v) = batch.query(device), batch.cache(device)
    wrapper = _wrapper(batch, device, pos_encoding_mode="ROPE_LLAMA")
    _plan(wrapper, batch, device)
    rotated = wrapper.run(q, (k, v), ranges)
    (key_rows,), _ = _rows(batch, (k, v))

    def turn(x: torch.Tensor, first: int) -> torch.Tensor:
        positions = torch.arange(first, first + len(x)).double()
        angle = positions[:, None] * 1e4 ** -(torch.arange(32).double() / 32)
        low, high = x.cpu().double().split(32, -1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    starts, pages, _, _ = batch.table()
    turned = k.clone().float().cpu()
    turned.flatten(0, 1)[(pages.long()[:, None] * 16 + torch.arange(16)).flatten()[:50]] = turn(
        key_rows, 0
    ).float()
    plain = _expected(batch, turn(q, 20), (turned, v), ranges, (-1, -1))[0]
    torch.testing.assert_close(rotated.cpu().double(), plain, atol=3e-2, rtol=3e-2)


def test_one_graph_wrapper_for_several_batches(device):
    def buffer(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    wrapper = _wrapper(
        MIXED,
        device,
        use_cuda_graph=True,
        qo_indptr_buf=buffer(6),
        paged_kv_indptr_buf=buffer(6),
        paged_kv_indices_buf=buffer(40),
        paged_kv_last_page_len_buf=buffer(5),
    )
    _plan(wrapper, MIXED, device)
    _check(wrapper, MIXED, device, _ranges(MIXED, device))
    smaller = Batch(**{**vars(MIXED), "qo_lens": (9, 30, 1, 7, 0), "kv_lens": (20, 64, 1, 9, 0)})
    _plan(wrapper, smaller, device)
    _check(wrapper, smaller, device, _anything(smaller, device), (-1, 8))


def test_other_names_of_run(device):
    wrapper = _wrapper(MIXED, device)
    _plan(wrapper, MIXED, device)
    q, cache, ranges = MIXED.query(device), MIXED.cache(device), _ranges(MIXED, device)
    out, lse = wrapper.run(q, cache, ranges, 40, 9, 2.0, 0.5, 3.0, return_lse=True)
    for name in ("run_return_lse", "forward_return_lse"):
        found = getattr(wrapper, name)(q, cache, ranges, 40, 9, 2.0, 0.5, 3.0)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    assert torch.equal(wrapper.forward(q, cache, ranges, 40, 9, 2.0, 0.5, 3.0), out)
    one = wrapper.run(q, cache, ranges, 40, 9)
    torch.testing.assert_close(out.float(), 3 * one.float(), atol=5e-2, rtol=2e-2)


def test_workspace_size_is_that_of_the_plan(device):
    wrapper = _wrapper(MIXED, device)
    starts, pages, last, _ = MIXED.table()
    table = (indptr(MIXED.qo_lens), starts, pages.to(device), last)
    sizes = wrapper.workspace_size(*table, 8, 2, 64, 16, fixed_split_size=64)
    assert sizes[1] > 0
    small = torch.empty(sizes[1] - 1, dtype=torch.uint8, device=device)
    wrapper.reset_workspace_buffer(workspace(device), small)
    with pytest.raises(ValueError, match=str(sizes[1])):
        wrapper.plan(*table, 8, 2, 64, 16, fixed_split_size=64)


def test_refusals_of_plan(device):
    for name, value in {"pos_encoding_mode": "ALIBI", "kv_data_type": torch.uint8}.items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            Wrapper(workspace(device), **{name: value})
    wrapper = _wrapper(MIXED, device)
    for name, value in {
        "causal": True,
        "window_left": 3,
        "logits_soft_cap": 20.0,
        "custom_mask": torch.ones(9, dtype=torch.bool),
        "packed_custom_mask": torch.ones(9, dtype=torch.uint8),
        "prefix_len_ptr": torch.ones(5, dtype=torch.int32),
        "token_pos_in_items_len": 5,
        "use_fp16_qk_reduction": True,
        "q_data_type": "float16",
        "o_data_type": FP16,
        "head_dim_vo": 128,
        "max_token_per_sequence": 129,
    }.items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            _plan(wrapper, MIXED, device, **{name: value})
        with pytest.raises(ValueError, match=r"plan\(\)"):
            wrapper.run(MIXED.query(device), MIXED.cache(device), _ranges(MIXED, device))


def test_refusals_of_run(device):
    wrapper = _wrapper(MIXED, device)
    _plan(wrapper, MIXED, device)
    q, cache, ranges = MIXED.query(device), MIXED.cache(device), _ranges(MIXED, device)
    for wrong in (ranges[:-1], ranges.long(), ranges.flatten(), ranges.t().contiguous().t(), None):
        with pytest.raises((TypeError, ValueError), match="bidirectional_ranges"):
            wrapper.run(q, cache, wrong)
    for name, value in {
        "causal_window_left": -2,
        "range_window_left": 1.5,
        "kv_cache_sf": cache,
        "return_lse": "yes",
        "out": q[:-1],
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"{name}"):
            wrapper.run(q, cache, ranges, **{name: value})


def test_the_checks_before_a_launch(device, monkeypatch):
    """Without the reference in between: what reaches the kernel, and what does not."""
    wrapper = _wrapper(MIXED, device)
    _plan(wrapper, MIXED, device)
    q, cache, ranges = MIXED.query(device), MIXED.cache(device), _ranges(MIXED, device)
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(wrapper._executor, "run", lambda *_, **options: launches.append(options))
    run = body_of(Wrapper.run)
    run(wrapper, q, cache, ranges, 7, range_window_left=3, k_scale=0.5)
    (options,) = launches
    first_rows = options["additional"][1]
    assert options["additional"][0] is ranges and options["additional"][2:] == (7, 3)
    assert first_rows.tolist() == [0, 40, 110, 111, 111, 241] and first_rows.dtype == torch.int32
    assert first_rows.device == device or device.type == "cuda"
    assert options["sm_scale"] == 0.5 / 8
    for wrong, windows in ((ranges[:-1], ()), (ranges, (-2,)), (ranges, (0, -2)), (None, ())):
        with pytest.raises((TypeError, ValueError), match="bidirectional_ranges|window_left"):
            run(wrapper, q, cache, wrong, *windows)
    with pytest.raises(ValueError, match="kv_cache_sf"):
        run(wrapper, q, cache, ranges, kv_cache_sf=cache)
    assert len(launches) == 1


def test_the_module_is_that_of_a_long_prompt(monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    spec = gen_batch_prefill_bidirectional_ranges_module(BF16, BF16, BF16, torch.int32, 128, 128)
    config = spec.config
    assert (config.backend, config.tile_q, config.mask_mode) == ("fa2", 128, "none")
    assert config.custom_variant and spec.name.startswith("causal_bidirectional_ranges_")
    with pytest.raises(ValueError, match="dtype_idx"):
        gen_batch_prefill_bidirectional_ranges_module(BF16, BF16, BF16, torch.int64, 128, 128)
