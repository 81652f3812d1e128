"""Partitions of a GPU on a pretended driver: what it is asked for, what is refused. No GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from flashinfer import green_ctx
from flashinfer._common import arch, driver

TOTAL = 132


class Driver:
    """Hands out multiprocessors as the driver of an H200 does, and remembers contexts by handle."""

    def __init__(self) -> None:
        self.contexts: dict[int, int] = {}
        self.streams: dict[int, int] = {}
        self.next = 100

    def _handle(self) -> int:
        self.next += 1
        return self.next

    def cuDeviceGetDevResource(self, device, out, kind) -> int:
        assert (device.value, kind) == (0, 1)
        return self._fill(out, TOTAL)

    def _fill(self, out, count: int) -> int:
        out._obj.type, out._obj.sm.smCount = 1, count
        out._obj.sm.minSmPartitionSize = 8  # marks what can be split
        return 0

    def cuDevSmResourceSplitByCount(self, found, groups, whole, rest, flags, least) -> int:
        assert flags.value == 0
        whole = whole._obj
        if whole.sm.minSmPartitionSize == 0:
            return 914  # a part of an earlier split
        size = max(8, -(-least.value // 8) * 8)
        if size > whole.sm.smCount:
            return 915
        count = min(groups._obj.value, whole.sm.smCount // size)
        groups._obj.value = count
        for index in range(count):
            found[index].type, found[index].sm.smCount = 1, size
        rest._obj.type, rest._obj.sm.smCount = 1, whole.sm.smCount - count * size
        return 0

    def cuDevResourceGenerateDesc(self, out, resource, count) -> int:
        assert count == 1 and resource._obj.sm.smCount > 0
        out._obj.value = resource._obj.sm.smCount
        return 0

    def cuGreenCtxCreate(self, out, description, device, flags) -> int:
        assert (device.value, flags.value) == (0, 1)
        out._obj.value = self._handle()
        self.contexts[out._obj.value] = description.value
        return 0

    def cuGreenCtxGetDevResource(self, context, out, kind) -> int:
        return self._fill(out, self.contexts[context.value])

    def cuGreenCtxStreamCreate(self, out, context, flags, priority) -> int:
        assert (flags.value, priority.value) == (1, 0)
        out._obj.value = self._handle()
        self.streams[out._obj.value] = context.value
        return 0

    def cuStreamGetGreenCtx(self, stream, out) -> int:
        out._obj.value = self.streams.get(stream.value)
        return 0

    def cuGetErrorName(self, status, out) -> int:
        names = {914: b"CUDA_ERROR_INVALID_RESOURCE_TYPE"}
        out._obj.value = names.get(status, b"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION")
        return 0


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with one GPU of compute capability 9.0."""
    found = Driver()
    monkeypatch.setattr(driver, "_library", lambda: found)
    monkeypatch.setattr(driver, "get_device_sm_count", lambda device: TOTAL)
    monkeypatch.setattr(arch, "_CAPABILITIES", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)

    def external(handle: int, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=handle, device=device)

    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    return found


def sizes(resources: list) -> list[int]:
    return [resource.sm.smCount for resource in resources]


def test_the_layout_is_that_of_the_header():
    assert ctypes.sizeof(driver.CUdevResource) == 144
    assert driver.CUdevResource.sm.offset == 96


@pytest.mark.parametrize(
    "groups, count, expected",
    [(2, 16, [16, 16, 100]), (1, 1, [8, 124]), (2, 61, [64, 64, 4])],
)
def test_equal_groups(pretended: Driver, groups: int, count: int, expected: list[int]):
    streams, resources = green_ctx.split_device_green_ctx(torch.device("cuda:0"), groups, count)
    assert sizes(resources) == expected
    found = [pretended.contexts[pretended.streams[stream.cuda_stream]] for stream in streams]
    assert found == expected and repr(resources[0]) == f"CUdevResource(sm.smCount={expected[0]})"


@pytest.mark.parametrize(
    "counts, expected",
    [([8, 16, 24], [8, 16, 24, 84]), ([1, 60], [8, 64, 60]), ([128], [128, 4])],
)
def test_groups_of_given_sizes(pretended: Driver, counts: list[int], expected: list[int]):
    device = torch.device("cuda:0")
    streams, resources = green_ctx.split_device_green_ctx_by_sm_count(device, counts)
    assert sizes(resources) == expected and len(streams) == len(expected)


def test_no_rest_no_stream(pretended: Driver, monkeypatch):
    monkeypatch.setitem(globals(), "TOTAL", 128)
    _, resources = green_ctx.split_device_green_ctx_by_sm_count(torch.device("cuda:0"), [64, 64])
    assert sizes(resources) == [64, 64]


def test_too_many_multiprocessors_are_refused(pretended: Driver):
    for groups, count in ((3, 41), (4, 33)):
        message = f"{groups} groups of {count} SMs cannot be cut from 132"
        with pytest.raises(RuntimeError, match=message):
            green_ctx.split_device_green_ctx(torch.device("cuda:0"), groups, count)
    message = r"groups of \[60, 70\] SMs, rounded up to \[64, 72\], cannot be cut from 132"
    with pytest.raises(RuntimeError, match=message):
        green_ctx.split_device_green_ctx_by_sm_count(torch.device("cuda:0"), [60, 70])
    with pytest.raises(RuntimeError, match="cannot be cut .*CUDA_ERROR_INVALID_RESOURCE_CONF"):
        green_ctx.split_device_green_ctx(torch.device("cuda:0"), 1, 133)


def test_arguments_are_checked(pretended: Driver):
    device = torch.device("cuda:0")
    with pytest.raises(ValueError, match="num_groups must be at least 1, got 0"):
        green_ctx.split_device_green_ctx(device, 0, 8)
    with pytest.raises(TypeError, match="min_count must be an int, got 8.0"):
        green_ctx.split_device_green_ctx(device, 1, 8.0)
    with pytest.raises(ValueError, match=r"sm_counts\[1\] must be at least 1, got -1"):
        green_ctx.split_device_green_ctx_by_sm_count(device, [8, -1])
    with pytest.raises(ValueError, match="sm_counts must have at least one size"):
        green_ctx.split_device_green_ctx_by_sm_count(device, [])
    with pytest.raises(ValueError, match="must be a cuda device"):
        green_ctx.split_device_green_ctx(torch.device("cpu"), 1, 8)


def test_constraints():
    assert green_ctx.get_sm_count_constraint(7, 5) == (2, 2)
    assert green_ctx.get_sm_count_constraint(8, 9) == (4, 2)
    assert green_ctx.get_sm_count_constraint(9, 0) == green_ctx.get_sm_count_constraint(12, 1)
    with pytest.raises(ValueError, match="compute capability 6.1"):
        green_ctx.get_sm_count_constraint(6, 1)


def test_planners_see_the_multiprocessors_of_the_stream(pretended: Driver, monkeypatch):
    device = torch.device("cuda:0")
    streams, _ = green_ctx.split_device_green_ctx(device, 1, 64)
    handles = {"default": 0, "pool": 7, "part": streams[0].cuda_stream}
    found = {}
    for name, handle in handles.items():
        stream = SimpleNamespace(cuda_stream=handle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index, stream=stream: stream)
        found[name] = driver.get_stream_sm_count(device)
    assert found == {"default": TOTAL, "pool": TOTAL, "part": 64}


def test_an_old_driver_is_named(monkeypatch):
    monkeypatch.setattr(driver, "_library", SimpleNamespace)
    with pytest.raises(RuntimeError, match="cuDeviceGetDevResource needs a driver of CUDA 12.4"):
        green_ctx.get_device_resource(0)
