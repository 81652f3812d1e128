"""CUPTI timing, simulated: which kernels count for which call, and every way to fail."""

import itertools
import types

import pytest
from simulated_device import FakeCupti
from simulated_device import device as device

import flashinfer.testing as testing
from flashinfer.testing import cupti_trace


@pytest.fixture
def cupti(device, monkeypatch):
    fake = FakeCupti(device)
    monkeypatch.setattr("flashinfer.testing.timers.load_cupti", lambda: fake)
    return fake


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_cupti_spans_the_kernels_of_each_call(device, cupti, use_cuda_graph):
    durations = itertools.cycle([1.0, 2.0, 4.0]) if not use_cuda_graph else itertools.repeat(2.0)

    def kernel():
        device.work(next(durations))
        device.work(0.5)

    times = testing.bench_gpu_time(
        kernel, enable_cupti=True, use_cuda_graph=use_cuda_graph, dry_run_iters=2, repeat_iters=6
    )
    assert sorted(set(times)) == ([2.5] if use_cuda_graph else [1.5, 2.5, 4.5])
    assert len(times) == 6
    assert device.flushes == 5 + 2 + 6, "flushes happen, and are no part of the spans"
    assert cupti.enabled == set(), "recording must be switched off again"


def test_cupti_falls_back_with_one_warning(device, monkeypatch):
    def unavailable():
        raise cupti_trace.CuptiUnavailableError("cupti-python does not import")

    monkeypatch.setattr("flashinfer.testing.timers.load_cupti", unavailable)
    with pytest.warns(RuntimeWarning, match="falling back from CUPTI to CUDA events") as caught:
        for _ in range(3):
            times = testing.bench_gpu_time(
                lambda: device.work(2.0), enable_cupti=True, repeat_iters=3
            )
            assert times == [2.0] * 3
    assert len(caught) == 1


def test_cupti_falls_back_to_a_graph(device, monkeypatch):
    def unavailable():
        raise cupti_trace.CuptiUnavailableError("no")

    monkeypatch.setattr("flashinfer.testing.timers.load_cupti", unavailable)
    with pytest.warns(RuntimeWarning, match="CUDA graphs"):
        times = testing.bench_gpu_time_with_cupti(
            lambda: device.work(2.0), use_cuda_graph=True, repeat_iters=3, cold_l2_cache=False
        )
    assert times == [2.0] * 3


def test_cupti_records_that_are_lost_cause_the_fall_back_not_a_wrong_time(device, cupti):
    cupti.drop = 10**6
    with pytest.warns(RuntimeWarning, match="recorded no kernel for 4 of 4"):
        times = testing.bench_gpu_time_with_cupti(
            lambda: device.work(2.0), dry_run_iters=0, repeat_iters=4
        )
    assert times == [2.0] * 4


def test_cupti_that_refuses_is_left_switched_off(device, cupti, monkeypatch):
    enable = cupti.activity_enable

    def refuse(kind):
        if kind == 10:
            raise RuntimeError("CUPTI_ERROR_NOT_COMPATIBLE")
        enable(kind)

    monkeypatch.setattr(cupti, "activity_enable", refuse)
    with pytest.warns(RuntimeWarning, match="CUPTI_ERROR_NOT_COMPATIBLE"):
        testing.bench_gpu_time_with_cupti(lambda: device.work(2.0), repeat_iters=2)
    assert cupti.enabled == set()


def test_an_exception_in_the_kernel_switches_cupti_off(device, cupti):
    calls = itertools.count()

    def kernel():
        if next(calls) == 4:
            raise ZeroDivisionError
        device.work(1.0)

    with pytest.raises(ZeroDivisionError):
        testing.bench_gpu_time_with_cupti(kernel)
    assert cupti.enabled == set()


def test_spans_ignore_work_outside_of_the_windows():
    trace = cupti_trace.Trace(
        launches=[(5, 1), (12, 2), (13, 3), (25, 4), (31, 5)],
        device_work=[
            (1, 0, 9_000_000, "before"),
            (3, 3_000_000, 4_000_000, "second kernel first in the list"),
            (2, 1_000_000, 2_000_000, "first kernel"),
            (4, 5_000_000, 9_000_000, "between the windows"),
            (5, 6_000_000, 6_500_000, "second window"),
            (99, 0, 10**9, "launch not recorded"),
        ],
    )
    assert trace.spans_ms([(10, 20), (30, 40)]) == [3.0, 0.5]


def test_cupti_package_is_checked(monkeypatch):
    def missing(name):
        raise ImportError("No module named 'cupti'")

    monkeypatch.setattr(cupti_trace.importlib, "import_module", missing)
    with pytest.raises(cupti_trace.CuptiUnavailableError, match="pip install -U cupti-python"):
        cupti_trace.load_cupti()


@pytest.mark.parametrize(("version", "usable"), [("12.8.0", False), ("13.0.1", True)])
def test_cupti_must_be_of_cuda_13(monkeypatch, version, usable):
    import importlib.metadata

    module = types.SimpleNamespace()
    monkeypatch.setattr(cupti_trace.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if usable:
        assert cupti_trace.load_cupti() is module
    else:
        with pytest.raises(cupti_trace.CuptiUnavailableError, match="12.8.0 is too old"):
            cupti_trace.load_cupti()
