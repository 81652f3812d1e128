"""Prefill and decode side by side, each against the reference of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing.attention import attention_check_options
from flashinfer.testing.numerics import compare
from flashinfer.trace.template import Gathered, resolve_template
from flashinfer.trace.templates.attention import (
    paged_prefill_run_trace,
    single_prefill_with_kv_cache_trace,
)
from tests.attention.batches import BF16, E4M3, E5M2, FP16, Batch, indptr, randn, workspace

DECODE = Batch((1,) * 5, (400, 0, 1, 64, 33), seed=5)
SHARED = ("sm_scale", "v_scale", "window_left", "pos_encoding_mode", "rope_scale", "rope_theta")


def check_parts(wrapper: Any, **arguments: Any) -> None:
    """Outputs and LSEs of both parts of `run`, within the bounds of attention alone."""
    api = type(wrapper).run
    arguments["self"] = wrapper
    template = resolve_template(api.__flashinfer_trace__, arguments)
    assert template is not None
    gathered = template.gathered(arguments)
    returned = api(**arguments)
    for part, results in zip("pd", returned, strict=True):
        mine = {key: gathered[key] for key in SHARED if key in gathered}
        if part == "p":
            mine.pop("v_scale", None)  # that of the decoding part
        elif "kv_indptr_p" not in gathered:  # each part has options of its own
            mine = {key: mine[key] for key in ("v_scale",) if key in mine}
        own = {key for key in gathered if key.endswith(f"_{part}")}
        mine |= {key.removesuffix(f"_{part}"): gathered[key] for key in own}
        mine["o_dtype"] = gathered["o_dtype"]
        if "kv_indptr" in mine:
            trace = paged_prefill_run_trace
            mine.setdefault("qo_indptr", torch.arange(len(mine["q"]) + 1))
        else:
            trace = single_prefill_with_kv_cache_trace
        alone = trace(return_lse=True) if trace is paged_prefill_run_trace else trace.templates[1]
        inputs = Gathered(mine)
        options = attention_check_options(alone, inputs)
        for actual, expected in zip(results, alone.compute(inputs), strict=True):
            found = compare(actual, expected, bound=options.bound_for(actual, mine))
            assert found, f"part {part}: {found}"


def plan_pod(batch: Batch, device: torch.device, **options: Any) -> Any:
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device), batch.kv_layout)
    starts, indices, last, _ = batch.table()
    sizes = (batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk, batch.page_size)
    wrapper.plan(starts, indices.to(device), last, *sizes, **batch.dtypes(), **options)
    return wrapper


def prefill_tensors(
    batch: Batch, device: torch.device, qo_len: int, kv_len: int, layout: str = "NHD"
) -> dict[str, torch.Tensor]:
    q = randn((qo_len, batch.num_qo_heads, batch.head_dim_qk), batch.dtype, device, 11)
    shape = (kv_len, batch.num_kv_heads, batch.head_dim_qk)
    k, v = (randn(shape, batch.stored, device, seed) for seed in (12, 13))
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return {"q_p": q, "k_p": k, "v_p": v}


def check_pod(
    wrapper: Any, batch: Batch, device: torch.device, lengths: tuple[int, int], **run: Any
) -> None:
    tensors = prefill_tensors(batch, device, *lengths, run.get("kv_layout_p", "NHD"))
    tensors |= {"q_d": batch.query(device), "paged_kv_cache_d": batch.cache(device)}
    check_parts(wrapper, return_lse_p=True, return_lse_d=True, **tensors, **run)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (5, 40), (129, 300), (300, 129), (0, 9), (7, 0)])
def test_lengths_of_the_prefill(lengths, causal, device):
    check_pod(plan_pod(DECODE, device), DECODE, device, lengths, causal_p=causal)


@pytest.mark.parametrize(
    "batch",
    [
        Batch((1,) * 3, (90, 5, 300), group=1),
        Batch((1,) * 3, (90, 5, 300), group=7, page_size=3),
        Batch((1,) * 3, (90, 5, 300), group=20, num_kv_heads=1, kv_layout="HND"),
        Batch((1,) * 3, (90, 5, 300), dtype=FP16, head_dim_qk=64, head_dim_vo=64, form="fused"),
        Batch((1,) * 3, (90, 5, 300), head_dim_qk=256, head_dim_vo=256, form="strided"),
        Batch((1,) * 3, (90, 5, 300), kv_dtype=E4M3),
        Batch((1,) * 3, (90, 5, 300), dtype=E4M3, o_dtype=BF16),
        Batch((1,) * 3, (90, 5, 300), dtype=E5M2, kv_dtype=E4M3, o_dtype=FP16, group=20),
        Batch((), ()),
    ],
    ids=["mha", "page 3", "HND", "float16", "256", "e4m3", "q e4m3", "q e5m2", "nothing to decode"],
)
def test_batches(batch, device):
    check_pod(plan_pod(batch, device), batch, device, (70, 110), causal_p=True)


def test_heads_first_prefill(device):
    run = {"kv_layout_p": "HND", "causal_p": True}
    check_pod(plan_pod(DECODE, device), DECODE, device, (70, 110), **run)


@pytest.mark.parametrize(
    ("plan", "run"),
    [
        ({"window_left": 20}, {"window_left_p": 20}),
        ({"sm_scale": 0.3}, {"sm_scale_p": 0.3}),
        ({"pos_encoding_mode": "ALIBI"}, {"pos_encoding_mode_p": "ALIBI"}),
        (
            {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e5},
            {"pos_encoding_mode_p": "ROPE_LLAMA", "rope_theta_p": 5e5},
        ),
        ({}, {"q_scale": 0.5, "k_scale": 4.0, "v_scale": 3.0}),
        ({"window_left": 20}, {"sm_scale_p": -0.3}),
        ({"sm_scale": 0.3}, {"window_left_p": 7}),
        ({"window_left": 20, "pos_encoding_mode": "ALIBI"}, {"window_left_p": 70}),
        ({"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0}, {"pos_encoding_mode_p": "ALIBI"}),
        (
            {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e5},
            {"pos_encoding_mode_p": "ROPE_LLAMA", "rope_scale_p": 4.0},
        ),
    ],
    ids=[
        "window",
        "scale",
        "alibi",
        "rope",
        "scales",
        "own window",
        "own scale",
        "two windows",
        "two encodings",
        "two rotations",
    ],
)
def test_options(plan, run, device):
    wrapper = plan_pod(DECODE, device, **plan)
    check_pod(wrapper, DECODE, device, (70, 110), causal_p=True, **run)


def scales_of_parts(device: torch.device) -> list[dict[str, Any]]:
    """Numbers and tensors, of one value and of each head, for either part."""
    heads, one = torch.tensor([0.5, 1.5], device=device), torch.tensor([0.25], device=device)
    queries = torch.linspace(0.5, 2.0, 8, dtype=torch.float32, device=device)
    return [
        {"q_scale": 0.3, "k_scale": 4.0, "v_scale": -3.0, "k_scale_p": 0.7, "v_scale_p": 0.1},
        {"q_scale_p": queries, "k_scale_p": heads, "v_scale_p": one, "k_scale": 0.3},
        {"q_scale": one, "k_scale": heads, "v_scale": heads, "q_scale_p": 1.7},
        {"q_scale": queries, "v_scale": one, "k_scale_p": one, "v_scale_p": heads},
    ]


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_scales_of_both_parts(dtype, device):
    batch = dataclasses.replace(DECODE, dtype=dtype, kv_dtype=E4M3, o_dtype=BF16)
    wrapper = plan_pod(batch, device)
    for scales in scales_of_parts(device):
        check_pod(wrapper, batch, device, (70, 110), causal_p=True, **scales)


@pytest.mark.parametrize("scales", [{"k_scale_p": -1.0}, {"q_scale": -0.5, "k_scale_p": 2.0}])
def test_a_negative_factor_of_one_part(scales, device):
    wrapper = plan_pod(DECODE, device)
    check_pod(wrapper, DECODE, device, (70, 110), causal_p=True, **scales)


def test_an_output_of_8_bits_is_refused(device):
    batch = dataclasses.replace(DECODE, dtype=E4M3)
    with pytest.raises(ValueError, match="`o_data_type`"):
        plan_pod(batch, device)


def test_scales_are_those_of_the_decoding_part(device):
    tensors = prefill_tensors(DECODE, device, 70, 110)
    tensors |= {"q_d": DECODE.query(device), "paged_kv_cache_d": DECODE.cache(device)}
    wrapper = plan_pod(DECODE, device)
    plain = wrapper.run(**tensors, causal_p=True)
    scaled = wrapper.run(**tensors, causal_p=True, k_scale=2.0, v_scale=2.0)
    assert torch.equal(plain[0], scaled[0])
    assert not torch.equal(plain[1], scaled[1])
    assert torch.equal(2 * plain[1], wrapper.run(**tensors, causal_p=True, v_scale=2.0)[1])


def test_masks(device):
    wrapper = plan_pod(DECODE, device)
    mask_p = torch.rand(70, 110, device=device) < 0.6
    mask_d = torch.rand(sum(DECODE.kv_lens), device=device) < 0.6
    check_pod(wrapper, DECODE, device, (70, 110), custom_mask_p=mask_p)
    check_pod(wrapper, DECODE, device, (70, 110), custom_mask_d=mask_d, causal_p=True)
    check_pod(wrapper, DECODE, device, (70, 110), causal_p=True)


def test_results_are_those_that_are_asked_for(device):
    wrapper = plan_pod(DECODE, device)
    tensors = prefill_tensors(DECODE, device, 70, 110)
    tensors |= {"q_d": DECODE.query(device), "paged_kv_cache_d": DECODE.cache(device)}
    (out_p, lse_p), (out_d, lse_d) = wrapper.run(**tensors, return_lse_p=True, return_lse_d=True)
    plain_p, plain_d = wrapper.run(**tensors)
    assert torch.equal(plain_p, out_p) and torch.equal(plain_d, out_d)
    (both_p, own_lse), alone = wrapper.run(**tensors, return_lse_p=True)
    assert torch.equal(own_lse, lse_p) and torch.equal(alone, out_d) and torch.equal(both_p, out_p)
    assert torch.equal(wrapper.run(**tensors, return_lse_d=True)[1][1], lse_d)


@pytest.mark.gpu
def test_one_graph_serves_every_batch(device):
    capacity, pages = 6, 200
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (7, pages, capacity)]
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    cache = tuple(torch.zeros(pages, 16, 2, 128, dtype=BF16, device=device) for _ in range(2))
    prefill = prefill_tensors(DECODE, device, 70, 110)
    q_d = torch.zeros(capacity, 8, 128, dtype=BF16, device=device)

    def plan(batch: Batch) -> None:
        starts, indices, last, _ = batch.table()
        wrapper.plan(starts, indices.to(device), last, 8, 2, 128, 16, q_data_type=BF16)

    def run() -> Any:
        return wrapper.run(**prefill, q_d=q_d, paged_kv_cache_d=cache, causal_p=True)

    plan(Batch((1,) * capacity, (64,) * capacity))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_p, out_d = run()
    for lengths in ((700,) * 4, (1,), (0, 5), (2000, 3, 64, 0, 1, 9)):
        batch = Batch((1,) * len(lengths), lengths, seed=sum(lengths))
        for mine, theirs in zip(cache, batch.cache(device), strict=True):
            mine[: len(theirs)].copy_(theirs)
        n = len(lengths)
        q_d[:n] = batch.query(device)
        plan(batch)
        out_p.fill_(float("nan"))
        out_d.fill_(float("nan"))
        graph.replay()
        alone = plan_pod(batch, device)
        tensors = {**prefill, "q_d": q_d[:n].clone(), "paged_kv_cache_d": cache}
        expected_p, expected_d = alone.run(**tensors, causal_p=True)
        torch.testing.assert_close(out_p, expected_p, rtol=0.01, atol=2e-3)
        torch.testing.assert_close(out_d[:n], expected_d, rtol=0.01, atol=2e-3)


# ---- two batches -------------------------------------------------------------------------------


def plan_batch_pod(prefill: Batch, decode: Batch, device: torch.device, **options: Any) -> Any:
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device), prefill.kv_layout)
    tables = []
    for batch in (prefill, decode):
        starts, indices, last, _ = batch.table()
        tables += [indptr(batch.qo_lens), starts, indices.to(device), last]
    sizes = (prefill.num_qo_heads, prefill.num_kv_heads, prefill.head_dim_qk, prefill.page_size)
    wrapper.plan(*tables, *sizes, **prefill.dtypes(), **options)
    return wrapper


def check_batch_pod(
    wrapper: Any, prefill: Batch, decode: Batch, device: torch.device, **run: Any
) -> None:
    parts = {"q_p": prefill.query(device), "paged_kv_cache_p": prefill.cache(device)}
    parts |= {"q_d": decode.query(device), "paged_kv_cache_d": decode.cache(device)}
    check_parts(wrapper, return_lse=True, **parts, **run)


PREFILL = Batch((40, 0, 129, 3), (200, 20, 129, 0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qo_lens", [(1,) * 5, (1, 2, 4, 0, 1), (1, 20, 3, 1, 9)])
def test_two_batches(qo_lens, causal, device):
    decode = Batch(qo_lens, DECODE.kv_lens, seed=5)
    wrapper = plan_batch_pod(PREFILL, decode, device)
    check_batch_pod(wrapper, PREFILL, decode, device, causal_p=causal)
    check_batch_pod(wrapper, PREFILL, decode, device, causal_p=not causal)


@pytest.mark.parametrize(
    "shape",
    [
        {"group": 1, "page_size": 1},
        {"group": 20, "num_kv_heads": 1, "kv_layout": "HND"},
        {"dtype": FP16, "form": "fused"},
        {"kv_dtype": E4M3, "form": "strided"},
        {"head_dim_qk": 80, "head_dim_vo": 80},
    ],
    ids=["page 1", "HND", "float16", "e4m3", "80"],
)
def test_two_batches_of_other_shapes(shape, device):
    prefill = Batch((40, 100), (60, 100), **shape)
    decode = Batch((1, 1, 1), (200, 0, 77), seed=5, **shape)
    wrapper = plan_batch_pod(prefill, decode, device)
    check_batch_pod(wrapper, prefill, decode, device, causal_p=True)


@pytest.mark.parametrize(
    "plan", [{"window_left": 20}, {"sm_scale": 0.3}, {"pos_encoding_mode": "ALIBI"}], ids=str
)
def test_options_of_two_batches(plan, device):
    wrapper = plan_batch_pod(PREFILL, DECODE, device, **plan)
    run = {"causal_p": True, "q_scale": 0.5, "v_scale": 2.0}
    check_batch_pod(wrapper, PREFILL, DECODE, device, **run)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_scales_of_two_batches(dtype, device):
    types = {"dtype": dtype, "kv_dtype": E4M3, "o_dtype": BF16}
    prefill = dataclasses.replace(PREFILL, **types)
    decode = Batch((1, 2, 4, 0, 1), DECODE.kv_lens, seed=5, **types)
    wrapper = plan_batch_pod(prefill, decode, device)
    check_batch_pod(wrapper, prefill, decode, device, causal_p=True)
    for scales in scales_of_parts(device):
        check_batch_pod(wrapper, prefill, decode, device, causal_p=True, **scales)


def test_mask_of_two_batches(device):
    wrapper = plan_batch_pod(PREFILL, DECODE, device)
    pairs = sum(q * k for q, k in zip(PREFILL.qo_lens, PREFILL.kv_lens, strict=True))
    mask = torch.rand(pairs, device=device) < 0.6
    check_batch_pod(wrapper, PREFILL, DECODE, device, custom_mask_p=mask)
    check_batch_pod(wrapper, PREFILL, DECODE, device, causal_p=True)
