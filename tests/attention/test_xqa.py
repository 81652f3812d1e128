"""XQA's and FMHA's faces of our attention kernels: the same results as the functions they face."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_fmha_v2_prefill

BATCH, HEADS, KV_HEADS, DIM, PAGE, WIDTH = 3, 8, 2, 128, 16, 20


@pytest.fixture
def workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(64 << 20, dtype=torch.uint8, device=device)


def _randn(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


def _cache(device: torch.device, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    inner = (PAGE, KV_HEADS) if layout == "NHD" else (KV_HEADS, PAGE)
    k, v = (_randn(device, BATCH * WIDTH, *inner, DIM) for _ in range(2))
    return k, v


def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    pages = torch.randperm(BATCH * WIDTH, device=device).int().view(BATCH, WIDTH)
    return pages, torch.tensor([33, 4, 320], dtype=torch.int32, device=device)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_xqa(layout, tokens, device, workspace):
    k, v = _cache(device, layout)
    pages, lengths = _tables(device)
    q = _randn(device, BATCH, 1, *((tokens,) if tokens > 1 else ()), HEADS, DIM)
    out = torch.empty_like(q)
    calls = ({}, {"sliding_win_size": 9}, {"q_scale": 0.5, "kv_scale": 2.0, "rcp_out_scale": 0.25})
    for options in calls:
        arguments = (q, k, v, pages, lengths[:, None], out, workspace, workspace, KV_HEADS, PAGE)
        returned = flashinfer.xqa(*arguments, kv_layout=layout, q_seq_len=tokens, **options)
        assert returned is None
        expected = xqa_batch_decode_with_kv_cache(
            q.view(-1, HEADS, DIM),
            (k, v),
            workspace,
            pages,
            lengths,
            WIDTH * PAGE,
            options.get("q_scale", 1.0) * options.get("kv_scale", 1.0) * DIM**-0.5,
            options.get("kv_scale", 1.0) * options.get("rcp_out_scale", 1.0),
            options.get("sliding_win_size", 0) - 1,
            kv_layout=layout,
            q_len_per_req=tokens,
        )
        assert torch.equal(out.view(-1, HEADS, DIM), expected)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_whose_keys_are_its_values(layout, device, workspace):
    k, _ = _cache(device, layout)
    pages, lengths = _tables(device)
    q = _randn(device, BATCH, HEADS, DIM)
    shared = (workspace, pages, lengths, WIDTH * PAGE, DIM**-0.5)
    for function in (xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache):
        expected = function(q, (k, k), *shared, kv_layout=layout)
        assert torch.equal(function(q, k[:, None], *shared, kv_layout=layout), expected)


def test_xqa_refuses_what_does_not_agree(device, workspace):
    k, v = _cache(device, "NHD")
    pages, lengths = _tables(device)
    q = _randn(device, BATCH, 1, HEADS, DIM)

    usual = q.clone()

    def call(out=usual, heads=KV_HEADS, **options):
        flashinfer.xqa(q, k, v, pages, lengths, out, workspace, workspace, heads, PAGE, **options)

    for name, options in (
        ("output", {"out": q[:, 0]}),
        ("q_seq_len", {"q_seq_len": 2}),
        ("k_cache", {"heads": 4}),
        ("mask", {"mask": lengths}),
        ("sm_count", {"sm_count": 8}),
        ("kv_layout", {"kv_layout": "HDN"}),
        ("sliding_win_size", {"sliding_win_size": -1}),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            call(**options)


def _prefill(device: torch.device) -> dict[str, object]:
    rows = torch.tensor([0, 5, 6, 40], dtype=torch.int32, device=device)
    lengths = rows.diff()
    return {
        "seq_lens": lengths,
        "max_q_len": 34,
        "max_kv_len": 34,
        "bmm1_scale": DIM**-0.5,
        "bmm2_scale": 0.5,
        "batch_size": 3,
        "cum_seq_lens_q": rows,
        "cum_seq_lens_kv": rows,
    }


@pytest.mark.parametrize("mask_mode", ["causal", "padding", "sliding_window"])
def test_fmha_layouts_agree(mask_mode, device, workspace):
    shared = {**_prefill(device), "workspace_buffer": workspace, "mask_mode": mask_mode}
    if mask_mode == "sliding_window":
        shared["window_left"] = 6
    qkv = _randn(device, 40, 3, KV_HEADS, DIM)
    q, k, v = (part.contiguous() for part in qkv.unbind(1))
    separate = trtllm_fmha_v2_prefill((q, k, v), "SEPARATE_Q_K_V", **shared)
    rows = shared["cum_seq_lens_q"].tolist()
    for begin, end in zip(rows, rows[1:], strict=False):
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), k[begin:end].double())
        steps = torch.arange(end - begin, device=device)
        distance = steps[:, None] - steps
        visible = distance >= 0 if mask_mode != "padding" else distance > -1000
        if mask_mode == "sliding_window":
            visible &= distance <= 6
        weights = (scores * DIM**-0.5).masked_fill(~visible, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v[begin:end].double()) * 0.5
        assert (separate[begin:end] - expected).abs().max() < 0.02
    out = torch.empty_like(separate)
    packed = trtllm_fmha_v2_prefill(qkv, "PACKED_QKV", out=out, **shared)
    assert packed is out and torch.equal(packed, separate)
    both = torch.stack([k, v], 1)
    assert torch.equal(trtllm_fmha_v2_prefill((q, both), "CONTIGUOUS_Q_KV", **shared), separate)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_fmha_pages(layout, device, workspace):
    pages, lengths = _tables(device)
    k, v = _cache(device, layout)
    q = _randn(device, 40, HEADS, DIM)
    shared = {**_prefill(device), "seq_lens": lengths + 40, "max_kv_len": 400}
    shared["workspace_buffer"] = workspace
    pages = torch.cat([pages, pages], 1)
    cache = torch.stack([k, v], 1)
    name = f"Q_PAGED_KV_{layout}"
    found = trtllm_fmha_v2_prefill((q, cache), name, block_tables=pages, **shared)
    half = trtllm_fmha_v2_prefill(
        (q, cache), name, block_tables=pages, out_dtype="float16", **shared
    )
    assert half.dtype == torch.float16 and (half.float() - found.float()).abs().max() < 0.02
    with pytest.raises(ValueError, match="block_tables"):
        trtllm_fmha_v2_prefill((q, cache), name, **shared)
    for wrong in (
        {"input_layout": "Q_KV"},
        {"mask_mode": "chunked"},
        {"window_left": 3},
        {"save_softmax_stats": True},
        {"skip_softmax_threshold_scale_factor": 1.0},
        {"logits_soft_cap_scale": 30.0},
    ):
        options = {"input_layout": name, "block_tables": pages, **shared, **wrong}
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            trtllm_fmha_v2_prefill((q, cache), **options)
