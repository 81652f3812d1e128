"""Profiles of `BatchAttention`: what its warps do, and results that they do not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.attention import PROFILE_EVENTS
from flashinfer.jit.attention import AttentionConfig, gen_attention_module
from flashinfer.profiler.events import Event, EventType, read_events
from tests.attention.batches import BF16, E4M3, Batch, need_backend
from tests.attention.test_batch_attention import plan_mixed

QUERY, LOAD, KEYS, WEIGHTS, VALUES, OUTPUT = range(len(PROFILE_EVENTS))
BATCH = Batch((1, 40, 0, 1, 300), (400, 200, 50, 0, 300))


def profiled_run(wrapper: Any, batch: Batch, device: torch.device) -> tuple[Any, list[Event]]:
    words = torch.zeros(1 << 20, dtype=torch.uint64, device=device)
    results = wrapper.run(batch.query(device), batch.cache(device), profiler_buffer=words)
    return results, read_events(words)


def counts_of(events: list[Event]) -> dict[int, list[int]]:
    """Number of each event by group; every one is nested in those that are open, and ends."""
    counts: dict[int, list[int]] = {}
    is_open: dict[tuple[int, int], list[int]] = {}
    for event in events:
        track = is_open.setdefault((event.block, event.group), [])
        if event.kind is EventType.kBegin:
            track.append(event.event)
            counts.setdefault(event.group, [0] * len(PROFILE_EVENTS))[event.event] += 1
        else:
            assert track.pop() == event.event
    assert not any(is_open.values())
    return counts


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("page_size", [16, 3])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_events_of_each_group(backend, page_size, kv_dtype, device: torch.device, tmp_path: Path):
    need_backend(backend, device)
    batch = Batch(BATCH.qo_lens, BATCH.kv_lens, page_size=page_size, kv_dtype=kv_dtype)
    usual = plan_mixed(batch, device, backend, causal=True)
    wrapper = plan_mixed(batch, device, backend, causal=True, use_profiler=True)
    expected = usual.run(batch.query(device), batch.cache(device))
    results, events = profiled_run(wrapper, batch, device)
    for got, wanted in zip(results, expected, strict=True):
        assert torch.equal(got, wanted)

    counts = counts_of(events)
    multiplying = range(4) if backend == "fa2" else range(max(counts) - 1)
    for group in multiplying:
        found = counts[group]
        assert found[KEYS] == found[WEIGHTS] == found[VALUES]
        # A warpgroup waits neither for keys nor for queries that it has seen to be there.
        assert found[LOAD] >= found[KEYS] if backend == "fa2" else found[LOAD] <= found[KEYS]
        assert found[OUTPUT] >= 4 * batch.num_kv_heads  # four requests have queries
        assert found[QUERY] == found[OUTPUT] or (backend == "fa3" and found[QUERY] > 0)
    if backend == "fa3":
        keys, values = (counts[max(counts) - i] for i in (1, 0))
        loads = counts[0][KEYS]
        assert keys == values == [0, loads, 0, 0, 0, 0]
    path = tmp_path / "trace.json"
    words = torch.zeros(1 << 20, dtype=torch.int64, device=device)
    wrapper.run(batch.query(device), batch.cache(device), profiler_buffer=words)
    flashinfer.profiler.export_to_perfetto_trace(words, list(PROFILE_EVENTS), str(path))
    rows = json.loads(path.read_text())["traceEvents"]
    assert {row["name"] for row in rows if row["ph"] == "B"} == set(PROFILE_EVENTS)


@pytest.mark.gpu
def test_one_launch_serves_what_two_would(device: torch.device):
    """Decodes beside a prompt, which `auto` would compute apart."""
    batch = Batch((1,) * 64 + (2000,), (3000,) * 64 + (2000,))
    wrapper = plan_mixed(batch, device, causal=True, use_profiler=True)
    results, events = profiled_run(wrapper, batch, device)
    expected = plan_mixed(batch, device, causal=True).run(batch.query(device), batch.cache(device))
    torch.testing.assert_close(results[0].float(), expected[0].float(), rtol=0.016, atol=4e-3)
    assert counts_of(events)


@pytest.mark.gpu
def test_a_full_buffer_drops_events(device: torch.device):
    wrapper = plan_mixed(BATCH, device, causal=True, use_profiler=True)
    guarded = torch.full((1000,), -7, device=device)
    guarded[:5] = 0
    wrapper.run(BATCH.query(device), BATCH.cache(device), profiler_buffer=guarded[:5])
    assert (guarded[5:] == -7).all() and guarded[0] != 0


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (None, TypeError),
        (torch.zeros(4), ValueError),
        (torch.zeros(0, dtype=torch.int64), ValueError),
        ("strided", ValueError),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError),
    ],
)
def test_buffers_that_are_refused(buffer: Any, error: type[Exception], device: torch.device):
    wrapper = plan_mixed(BATCH, device, causal=True, use_profiler=True)
    if isinstance(buffer, torch.Tensor):
        buffer = buffer.to(device)
    elif buffer == "strided":  # moved to the device, it would be dense
        buffer = torch.zeros(8, dtype=torch.int64, device=device)[::2]
    with pytest.raises(error, match="`profiler_buffer`"):
        wrapper.run(BATCH.query(device), BATCH.cache(device), profiler_buffer=buffer)


def test_a_buffer_without_a_profile_is_refused(device: torch.device):
    wrapper = plan_mixed(BATCH, device, causal=True)
    words = torch.zeros(64, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="`profiler_buffer`"):
        wrapper.run(BATCH.query(device), BATCH.cache(device), profiler_buffer=words)


@pytest.mark.parametrize("option", ["custom_variant", "device_lengths"])
def test_configurations_that_are_refused(option: str):
    with pytest.raises(ValueError, match="`use_profiler`"):
        AttentionConfig(BF16, BF16, BF16, 128, 128, 8, profiled=True, **{option: True})


@pytest.mark.compiler
@pytest.mark.parametrize(
    "fields",
    [{"tile_q": 64, "tile_q_second": 16}, {"tile_q": 128, "backend": "fa3"}],
    ids=["fa2", "fa3"],
)
def test_modules_compile(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    config = AttentionConfig(
        BF16, BF16, BF16, 128, 128, mask_mode="causal", profiled=True, **fields
    )
    spec = gen_attention_module(config)
    spec.build()
    assert "profiled" in spec.name
