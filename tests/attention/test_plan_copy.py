"""Plans reach the GPU whole, however many are under way."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan.planner import AttentionPlanner
from tests.attention.batches import BF16, WORKSPACE_BYTES, Batch, indptr
from tests.attention_plans import Options, Requests, plan_with

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]

BUSY = 20_000_000  # cycles


def planner() -> AttentionPlanner:
    result = AttentionPlanner()
    result.configure(Options().config())
    return result


def written(workspace: torch.Tensor, info: dict[str, Any]) -> torch.Tensor:
    """The merges and the items; nothing is said about the bytes between them."""
    merges = workspace[info["merges_offset"] :][: info["num_merges"] * 48]
    return torch.cat([merges, workspace[info["items_offset"] : info["int_bytes"]]]).cpu()


def test_plans_in_flight_do_not_overwrite_each_other():
    """More plans than staging buffers, small and large, before the first copy can start."""
    gpu = planner()
    batches = [Requests(1, (1000 * (i + 1),) * size) for i, size in enumerate([3, 64, 900] * 4)]
    workspaces = [torch.zeros(1 << 18, dtype=torch.uint8, device="cuda") for _ in batches]
    torch.cuda._sleep(BUSY)
    infos = [
        plan_with(gpu, workspace, -1, batch.group())
        for workspace, batch in zip(workspaces, batches, strict=True)
    ]
    torch.cuda.synchronize()
    for workspace, batch, info in zip(workspaces, batches, infos, strict=True):
        expected = torch.zeros(1 << 18, dtype=torch.uint8)
        assert plan_with(planner(), expected, -1, batch.group()) == info
        assert torch.equal(written(workspace, info), written(expected, info))


def test_the_copy_is_on_the_current_stream():
    """A plan on a busy stream leaves the GPU's list alone until the stream gets there."""
    side = torch.cuda.Stream()
    workspace = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    gpu, group = planner(), Requests(1, (8192,) * 4).group()
    gpu.plan(workspace, -1, group)  # buffers are there now
    assert workspace.any().item()  # its kernel is loaded: loading would wait for `side`
    workspace.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50 * BUSY)
        gpu.plan(workspace, -1, group)
    early = workspace.any().item()  # by the default stream, which does not wait for `side`
    assert not side.query(), "the stream was not busy for long enough to tell"
    assert not early
    side.synchronize()
    assert workspace.any().item()


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_plan_and_run_wait_for_nothing_on_the_gpu(path, device):
    """With lengths on the host nothing is fetched, and no synchronisation hides in a step."""
    batch = Batch((1, 1, 1) if path == "decode" else (30, 1, 700), (5000, 64, 700))
    starts, indices, last, _ = batch.table()
    arguments = (starts, indices.to(device), last, 8, 2, 128, 16)
    if path == "prefill":
        arguments = (indptr(batch.qo_lens), *arguments)
    name = "BatchDecode" if path == "decode" else "BatchPrefill"
    floats = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = getattr(flashinfer, f"{name}WithPagedKVCacheWrapper")(floats)
    q, cache = batch.query(device), batch.cache(device)
    out = torch.empty_like(q)

    def step() -> None:
        wrapper.plan(*arguments, q_data_type=BF16)
        wrapper.run(q, cache, out=out)

    for _ in range(4):  # compiled, loaded, and each staging buffer used once
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * BUSY)
    step()
    assert not torch.cuda.current_stream().query(), "the step waited for the GPU"
    torch.cuda.synchronize()


@pytest.mark.parametrize("path", ["decode", "prefill", "BatchAttention"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_tensors_on_the_gpu_are_fetched_by_one_copy(path, dtype, device):
    batch = Batch((1, 1, 1) if path == "decode" else (30, 1, 700), (5000, 64, 700))
    starts, indices, last, _ = batch.table()
    tables = [starts, indices, last]
    if path == "BatchAttention":
        tables[2] = torch.tensor(batch.kv_lens)
    if path != "decode":
        tables = [indptr(batch.qo_lens), *tables]
    tables = [table.to(device, dtype) for table in tables]
    heads: tuple[int, ...] = (8, 2, 128, 16)
    floats = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper: Any = flashinfer.BatchAttention(device=str(device))
    if path == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(floats)
    elif path == "prefill":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(floats)
    else:
        heads = (8, 2, 128, 128, 16)
    wrapper.plan(*tables, *heads, q_data_type=BF16)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            wrapper.plan(*tables, *heads, q_data_type=BF16)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in map(str, (w.message for w in caught)) if "called a synchronizing" in w]
    assert len(waits) == 1, waits


def test_a_plan_within_a_capture_is_refused():
    gpu, group = planner(), Requests(1, (8192,) * 4).group()
    workspace = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    with (
        pytest.raises(ValueError, match="before the capture of a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        gpu.plan(workspace, -1, group)
    torch.cuda.synchronize()
    assert not workspace.any()
    gpu.plan(workspace, -1, group)
    assert workspace.any()
