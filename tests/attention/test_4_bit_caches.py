"""Attention over 4-bit caches (NVFP4): codes in pairs, a scale for 16 of them, a global one."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from tests.attention.batches import (
    BF16,
    E4M3,
    FP16,
    Batch,
    check,
    indptr,
    plan_decode,
    plan_paged,
    plan_ragged,
    workspace,
)
from tests.attention.packed import (
    PACKED,
    block_tables,
    packed_cache,
    packed_pages,
    packed_rows,
)

LENGTHS = (0, 1, 63, 64, 65, 200, 16, 0)
SCALES = {"q_scale": 1.5, "k_scale": 0.25, "v_scale": -2.5}


def _batch(qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], **changes) -> Batch:
    return Batch(qo_lens, kv_lens, **{"kv_dtype": PACKED, **changes})


def _decode(**changes) -> Batch:
    return _batch((1,) * len(LENGTHS), LENGTHS, **changes)


def _check(wrapper, batch: Batch, device, **run) -> None:
    arguments = packed_pages(batch, device) | run
    check(type(wrapper).run, self=wrapper, return_lse=True, **arguments)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("form", ["tuple", "fused", "strided"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode(dtype, form, kv_layout, device):
    batch = _decode(dtype=dtype, form=form, kv_layout=kv_layout)
    wrapper = plan_decode(batch, device)
    _check(wrapper, batch, device)
    _check(wrapper, batch, device, **SCALES)


@pytest.mark.parametrize("group", [1, 5, 8, 16])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_decode_of_groups_and_pages(group, page_size, device):
    batch = _decode(group=group, page_size=page_size, kv_layout="HND")
    _check(plan_decode(batch, device), batch, device)


@pytest.mark.parametrize("head_dim", [64, 192, 256, 512])
def test_decode_of_head_dims(head_dim, device):
    batch = _decode(head_dim_qk=head_dim, head_dim_vo=head_dim)
    _check(plan_decode(batch, device), batch, device)


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
def test_decode_that_ends_within_a_pass(page_size, device):
    """A warp has 32 tokens of 128 at a time, of one page or of two."""
    lengths = (31, 32, 33, 95, 96, 97, 127, 128, 129, 257)
    batch = _batch((1,) * len(lengths), lengths, page_size=page_size)
    _check(plan_decode(batch, device), batch, device)


@pytest.mark.parametrize("options", [{"window_left": 30}, {"logits_soft_cap": 5.0}])
def test_decode_of_several_queries_with_options(options, device):
    batch = _batch((3,) * 4, (3, 64, 200, 3))
    _check(plan_decode(batch, device, q_len_per_req=3, **options), batch, device)


def test_decode_with_sinks_and_scales_of_heads(device):
    batch = _decode()
    scales = {
        name: torch.linspace(0.5, 1.5, 2, dtype=torch.float32, device=device)
        for name in ("k_scale", "v_scale")
    }
    sinks = torch.linspace(-2.0, 3.0, batch.num_qo_heads, device=device)
    _check(plan_decode(batch, device), batch, device, sinks=sinks, **scales)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("qo_lens", [(20, 3, 0), (200, 5, 31)], ids=["short", "long"])
@pytest.mark.parametrize("heads", [(128, 128), (64, 128), (256, 64)], ids=str)
def test_prefill(qo_lens, dtype, heads, device):
    sizes = {"head_dim_qk": heads[0], "head_dim_vo": heads[1]}
    batch = _batch(qo_lens, (200, 129, 70), dtype=dtype, **sizes)
    _check(plan_paged(batch, device, causal=True), batch, device, **SCALES)
    wrapper = plan_ragged(batch, device)
    rows = packed_rows(batch, device)
    check(type(wrapper).run, self=wrapper, q=batch.query(device), return_lse=True, **rows)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_both_tiles_in_one_launch(kv_layout, device):
    batch = _batch((130, 1, 1, 5), (200, 300, 64, 5), kv_layout=kv_layout)
    starts, indices, _, _ = batch.table()
    wrapper = flashinfer.BatchAttention(kv_layout, device=str(device))
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32)
    heads = (batch.num_qo_heads, batch.num_kv_heads, 128, 128, batch.page_size)
    plan = (indptr(batch.qo_lens), starts, indices.to(device), lengths, *heads)
    wrapper.plan(*plan, causal=True, q_data_type=BF16, kv_data_type=PACKED)
    arguments = packed_pages(batch, device)
    arguments["kv_cache"] = arguments.pop("paged_kv_cache")
    check(type(wrapper).run, self=wrapper, k_scale=0.5, v_scale=2.0, **arguments)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_one_request(kv_layout, device):
    batch = _batch((70,), (133,), kv_layout=kv_layout)
    rows = packed_rows(batch, device)
    options = {"causal": True, "kv_layout": kv_layout, "k_scale": 0.5, "return_lse": True}
    check(flashinfer.single_prefill_with_kv_cache, q=batch.query(device), **rows, **options)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_functions_that_take_block_tables(kv_layout, device):
    """Lengths on the GPU, planned there; the wrapper, planned on the host, has the same results."""
    batch = _batch((1,) * 6, (5, 64, 65, 300, 16, 33), kv_layout=kv_layout)
    wrapper = plan_decode(batch, device, sm_scale=0.1)
    run = packed_pages(batch, device)
    expected = wrapper.run(**run, v_scale=2.0)
    arguments = {
        "query": run["q"],
        "kv_cache": run["paged_kv_cache"],
        "kv_cache_sf": run["kv_cache_sf"],
        "workspace_buffer": workspace(device),
        "kv_layout": kv_layout,
        "bmm1_scale": 0.1,
        "bmm2_scale": 2.0,
        "max_seq_len": 300,
        **block_tables(batch, device),
    }
    for function in (
        flashinfer.decode.xqa_batch_decode_with_kv_cache,
        flashinfer.decode.trtllm_batch_decode_with_kv_cache,
    ):
        torch.testing.assert_close(function(**arguments), expected, rtol=2e-2, atol=2e-2)


def test_run_refuses(device):
    batch = _decode()
    wrapper = plan_decode(batch, device)
    run = packed_pages(batch, device)
    k_sf, v_sf = run["kv_cache_sf"]
    wrong = (
        None,
        (k_sf[..., :4], v_sf),
        (k_sf[:-1], v_sf[:-1]),
        (k_sf.float(), v_sf),
        torch.stack([k_sf, v_sf], 1)[:, :1],
    )
    for scales in wrong:
        with pytest.raises((TypeError, ValueError), match="kv_cache_sf"):
            wrapper.run(**(run | {"kv_cache_sf": scales}))
    other = Batch((1,) * len(LENGTHS), LENGTHS, kv_dtype=E4M3)
    with pytest.raises(ValueError, match="kv_cache_sf"):
        plan_decode(other, device).run(
            other.query(device), other.cache(device), kv_cache_sf=(k_sf, v_sf)
        )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("head_dim", {"head_dim_qk": 96, "head_dim_vo": 96}),
        ("kv_data_type", {"dtype": E4M3, "o_dtype": BF16}),
    ],
)
def test_plan_refuses(name, changes, device):
    with pytest.raises(ValueError, match=name):
        plan_decode(_decode(**changes), device)


def test_results_repeat_bit_for_bit(device):
    if device.type != "cuda":
        pytest.skip("repeats without a GPU say nothing of the kernel")
    batch = _batch((1,) * 4, (4000, 30, 700, 64))
    wrapper = plan_decode(batch, device)
    run = packed_pages(batch, device)
    first = wrapper.run(**run)
    assert all(torch.equal(first, wrapper.run(**run)) for _ in range(10))


def test_a_scale_that_is_no_number_shows(device):
    """A NaN in one scale is in the columns of its block, if it belongs to a value."""
    batch = _batch((1,), (100,))
    (k, v), (k_sf, v_sf) = packed_cache(batch, device)
    starts, indices, _, _ = batch.table()
    v_sf[int(indices[0]), 5, 0, 2] = 0x7F
    out = plan_decode(batch, device).run(batch.query(device), (k, v), kv_cache_sf=(k_sf, v_sf))
    hit = out[0, : batch.group].isnan()
    assert hit[:, 32:48].all() and not hit[:, :32].any() and not hit[:, 48:].any()
    assert not out[0, batch.group :].isnan().any()
