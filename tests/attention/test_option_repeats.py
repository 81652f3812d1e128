"""Runs of one plan are equal bit for bit, with each option, for each kernel that has it: 10,000 of
them under ``--full``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing.tensors import iter_tensors
from tests.attention.batches import BF16, E4M3, E5M2, Batch, indptr, need_backend, workspace
from tests.attention.calls import make_call
from tests.attention.packed import PACKED, block_tables
from tests.attention.test_cascade_attention import LEVELS, Cascade
from tests.attention.test_pod import PREFILL, plan_batch_pod, plan_pod, prefill_tensors

pytestmark = pytest.mark.gpu

KV_LENS = (3000, 17, 600, 0, 64)  # the first is cut, on every GPU
QO_LENS = {"decode": (1,) * 5, "paged": (30, 17, 1, 5, 64), "ragged": (30, 17, 1, 5, 64)}
RUNS, FULL_RUNS = 100, 10_000

Options = dict[str, dict[str, Any]]  # of the batch, of plan and of run


def _mask(batch: Batch, device: torch.device) -> Options:
    size = sum(q * k for q, k in zip(batch.qo_lens, batch.kv_lens, strict=True))
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(size, generator=generator) < 0.5
    return {"plan": {"custom_mask": mask.to(device)}}


def _items(batch: Batch, device: torch.device) -> Options:
    count, length = len(batch.kv_lens), 40
    positions = torch.arange(length, dtype=torch.int16).repeat(count)
    return {
        "plan": {
            "causal": True,
            "prefix_len_ptr": torch.tensor([max(n - 35, 0) for n in batch.kv_lens]).int(),
            "token_pos_in_items_ptr": positions.to(device),
            "token_pos_in_items_len": length,
            "max_item_len_ptr": torch.full((count,), length, dtype=torch.int16, device=device),
        }
    }


def _sinks(batch: Batch, device: torch.device) -> Options:
    return {"run": {"sinks": torch.linspace(-2, 3, batch.num_qo_heads, device=device)}}


def _head_scales(batch: Batch, device: torch.device) -> Options:
    scales = torch.linspace(0.5, 1.5, batch.num_kv_heads, device=device)
    return {"run": {"k_scale": scales, "v_scale": scales}}


CAP, WINDOW = {"logits_soft_cap": 20.0}, {"window_left": 200}
OF_512 = {"head_dim_qk": 512, "head_dim_vo": 512}
OF_256 = {"head_dim_qk": 256, "head_dim_vo": 256}
OF_8_BITS = {"dtype": E4M3, "o_dtype": BF16}
DECODE, PREFILLS = (("decode", "fa2"),), (("paged", "fa2"), ("paged", "fa3"))
BOTH = (*DECODE, *PREFILLS)
PORTABLE = (*DECODE, ("paged", "fa2"))
Case = tuple[Options | Callable[[Batch, torch.device], Options], tuple[tuple[str, str], ...]]
CASES: dict[str, Case] = {
    "soft cap": ({"plan": CAP}, BOTH),
    "window": ({"plan": WINDOW}, BOTH),
    "window and soft cap": ({"plan": {**CAP, **WINDOW}}, BOTH),
    "rope": ({"plan": {"pos_encoding_mode": "ROPE_LLAMA"}}, (*PORTABLE, ("paged", "auto"))),
    "rope, e5m2 keys": (
        {"plan": {"pos_encoding_mode": "ROPE_LLAMA"}, "batch": {"kv_dtype": E5M2}},
        PORTABLE,
    ),
    "alibi": ({"plan": {"pos_encoding_mode": "ALIBI"}}, BOTH),
    "mask": (_mask, PREFILLS),
    "items": (_items, PREFILLS),
    "pages of 1": ({"batch": {"page_size": 1}}, BOTH),
    "heads of 512": ({"batch": OF_512}, PORTABLE),
    "heads of 512, e4m3 keys": ({"batch": {**OF_512, "kv_dtype": E4M3}}, PORTABLE),
    "heads of 448/256": ({"batch": {"head_dim_qk": 448, "head_dim_vo": 256}}, PREFILLS[:1]),
    "heads of 256": ({"batch": OF_256}, BOTH),
    "heads of 192/128": ({"batch": {"head_dim_qk": 192}}, PREFILLS),
    "4 bits": ({"batch": {"kv_dtype": PACKED}}, PORTABLE),
    "e4m3 keys": ({"batch": {"kv_dtype": E4M3}}, BOTH),
    "8-bit queries": ({"batch": OF_8_BITS}, (*BOTH, ("decode", "fa3"))),
    "sinks": (_sinks, BOTH),
    "scales of heads": (_head_scales, BOTH),
    "cut at 256": ({"plan": {"fixed_split_size": 256}}, BOTH),
    "not cut": ({"plan": {"fixed_split_size": 256, "disable_split_kv": True}}, BOTH),
    "ragged": ({}, (("ragged", "fa2"), ("ragged", "fa3"))),
}


def check_repeats(call: Callable[[], Any], device: torch.device, full: bool) -> None:
    """All results of all runs have the bits of the first ones."""
    first = [tensor.view(torch.uint8) for tensor in iter_tensors(call())]
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(FULL_RUNS if full else RUNS):
        again = [tensor.view(torch.uint8) for tensor in iter_tensors(call())]
        for mine, theirs in zip(again, first, strict=True):
            different += (mine != theirs).any()
    assert first and int(different) == 0


@pytest.mark.parametrize(
    ("name", "path", "backend"),
    [(name, *path) for name, (_, paths) in CASES.items() for path in paths],
)
def test_runs_of_a_plan(name: str, path: str, backend: str, device: torch.device, full: bool):
    need_backend(backend, device)
    given = CASES[name][0]
    batch = Batch(QO_LENS[path], KV_LENS)
    options = given(batch, device) if callable(given) else given
    batch = Batch(QO_LENS[path], KV_LENS, **options.get("batch", {}))
    plan = {**({} if path == "decode" else {"causal": True}), **options.get("plan", {})}
    call = make_call(path, batch, device, **plan).with_make(backend=backend)
    wrapper = call.with_run(**options.get("run", {})).planned()
    run = {**call.run, **options.get("run", {}), "return_lse": True}
    check_repeats(lambda: wrapper.run(**run), device, full)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_runs_of_two_parts(dtype: torch.dtype, device: torch.device, full: bool):
    types = {"dtype": dtype, "o_dtype": BF16}
    decode = Batch((1,) * 5, KV_LENS, **types)
    prefill = Batch(PREFILL.qo_lens, PREFILL.kv_lens, **types)
    pod = plan_pod(decode, device)
    tensors = prefill_tensors(decode, device, 70, 3000)
    tensors |= {"q_d": decode.query(device), "paged_kv_cache_d": decode.cache(device)}
    scales = {"k_scale": 0.5, "k_scale_p": 1.5}
    check_repeats(lambda: pod.run(**tensors, **scales, causal_p=True), device, full)
    batches = plan_batch_pod(prefill, decode, device)
    parts = (prefill.query(device), prefill.cache(device))
    both = (*parts, decode.query(device), decode.cache(device))
    check_repeats(lambda: batches.run(*both, causal_p=True, **scales), device, full)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_runs_of_a_cascade(dtype: torch.dtype, backend: str, device: torch.device, full: bool):
    cascade = Cascade(LEVELS["three"], device)
    wrapper = cascade.plan(dtype, backend=backend, causal=True, o_data_type=BF16)
    tensors = cascade.tensors(dtype)
    check_repeats(lambda: wrapper.run(*tensors), device, full)


def test_runs_of_mixed_batches(device: torch.device, full: bool):
    batch = Batch((130, 1, 1, 5), (2000, 3000, 64, 5))
    starts, indices, _, _ = batch.table()
    wrapper = flashinfer.BatchAttention("NHD", device=str(device))
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32)
    heads = (batch.num_qo_heads, batch.num_kv_heads, 128, 128, batch.page_size)
    plan = (indptr(batch.qo_lens), starts, indices.to(device), lengths, *heads)
    wrapper.plan(*plan, causal=True, **batch.dtypes(), **CAP)
    q, cache = batch.query(device), batch.cache(device)
    cap = CAP["logits_soft_cap"]
    check_repeats(lambda: wrapper.run(q, cache, logits_soft_cap=cap), device, full)


@pytest.mark.parametrize("name", ["xqa", "trtllm"])
def test_calls_with_lengths_on_the_device(name: str, device: torch.device, full: bool):
    batch = Batch((1,) * 5, KV_LENS)
    function = getattr(flashinfer.decode, f"{name}_batch_decode_with_kv_cache")
    arguments = {
        **block_tables(batch, device),
        "query": batch.query(device),
        "kv_cache": batch.cache(device),
        "workspace_buffer": workspace(device),
        "max_seq_len": max(KV_LENS),
        "bmm1_scale": 0.1,
        "kv_layout": "NHD",
    }
    check_repeats(lambda: function(**arguments), device, full)
