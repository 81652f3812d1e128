"""The timing functions against a simulated device: a clock that work advances, on any machine."""

import contextlib

import pytest
import torch
from simulated_device import device as device

import flashinfer.testing as testing
from flashinfer.testing import timers

FUNCTIONS = [
    testing.bench_gpu_time,
    testing.bench_gpu_time_with_cuda_event,
    testing.bench_gpu_time_with_cudagraph,
    testing.bench_gpu_time_with_cupti,
]


@pytest.mark.parametrize("cold", [True, False])
def test_events_time_the_call_and_not_the_flush(device, cold):
    times = testing.bench_gpu_time_with_cuda_event(
        lambda: device.work(2.0), dry_run_iters=3, repeat_iters=11, cold_l2_cache=cold
    )
    assert times == [2.0] * 11
    # Five to estimate, three dry runs, eleven that count.
    assert device.flushes == (19 if cold else 0)


def test_iterations_fill_the_asked_time(device):
    calls = []
    times = testing.bench_gpu_time(
        lambda: (calls.append(1), device.work(2.0)), dry_run_time_ms=20, repeat_time_ms=60
    )
    assert len(times) == 30
    assert len(calls) == 1 + 5 + 10 + 30


def test_iterations_are_limited_for_short_kernels(device):
    assert len(testing.bench_gpu_time(lambda: device.work(1e-4))) == 1000
    assert len(testing.bench_gpu_time(lambda: None)) == 1000


@pytest.mark.parametrize("run", FUNCTIONS[:3])
def test_aliases(device, run):
    seen = []

    def kernel(*args, **kwargs):
        seen.append((args, kwargs))
        device.work(1.0)

    times = run(
        kernel,
        args=(1, 2),
        input_kwargs={"k": 3},
        num_iters=4,
        dry_run_iters=1,
        cold_l2_cache=False,
    )
    assert len(times) == 4
    assert set(map(repr, seen)) == {repr(((1, 2), {"k": 3}))}


def test_graph_divides_by_its_calls(device):
    times = testing.bench_gpu_time_with_cudagraph(
        lambda: device.work(3.0), repeat_iters=5, num_iters_within_graph=4, cold_l2_cache=False
    )
    assert times == [3.0] * 5


def test_graph_rotates_over_copies_that_exceed_twice_the_cache(device, monkeypatch):
    monkeypatch.setattr(timers, "storage_bytes", lambda tree: 300)
    monkeypatch.setattr(
        timers, "clone_arguments", lambda tree, where: testing.clone_arguments(tree)
    )
    used = []

    def kernel(x, out):
        if device.capturing is not None:
            used.append((x.data_ptr(), out.data_ptr()))
        device.work(1.0)

    x, out = torch.zeros(4), torch.zeros(4)
    times = testing.bench_gpu_time_with_cudagraph(
        kernel, repeat_iters=2, num_iters_within_graph=5, input_args=(x,), input_kwargs={"out": out}
    )
    # 2 * 1000 bytes of cache need 7 copies of 300 bytes, so ten calls: twice the asked five.
    assert len(used) == 10
    assert len(set(used[:7])) == 7
    assert used[7:] == used[:3]
    assert used[0] == (x.data_ptr(), out.data_ptr())
    assert times == [1.0, 1.0]
    assert device.flushes == 0


def test_graph_of_tiny_arguments_says_that_the_cache_may_be_warm(device, monkeypatch):
    monkeypatch.setattr(timers, "storage_bytes", lambda tree: 10)
    monkeypatch.setattr(timers, "_MAX_COPIES", 100)
    with pytest.warns(RuntimeWarning, match="arguments of 10 bytes: 100 copies"):
        times = testing.bench_gpu_time(
            lambda x: device.work(1.0), input_args=(0,), use_cuda_graph=True, repeat_iters=2
        )
    assert times == [1.0, 1.0]


def test_graph_without_tensors_flushes_and_says_so(device):
    with pytest.warns(RuntimeWarning, match="no tensor in input_args"):
        times = testing.bench_gpu_time_with_cudagraph(lambda: device.work(3.0), repeat_iters=5)
    assert times == [3.0] * 5
    assert device.flushes > 5


def test_sleep_after_run_sleeps_once_per_timed_call(device, monkeypatch):
    naps = []
    monkeypatch.setattr(timers.time, "sleep", naps.append)
    testing.bench_gpu_time(lambda: device.work(2.0), repeat_iters=4, sleep_after_run=True)
    assert naps == [0.01] * 4


@pytest.mark.parametrize(
    ("milliseconds", "seconds"),
    [(0.0, 0.01), (20.0, 0.1), (1e6, 1.0), (float("inf"), 1.0), (float("nan"), 1.0)],
)
def test_sleep_is_proportional_and_bounded(monkeypatch, milliseconds, seconds):
    naps = []
    monkeypatch.setattr(timers.time, "sleep", naps.append)
    testing.sleep_after_kernel_run(milliseconds)
    assert naps == [pytest.approx(seconds)]


@pytest.mark.parametrize("run", FUNCTIONS)
def test_without_a_gpu_the_refusal_says_so(monkeypatch, run):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        run(lambda: None)


@pytest.mark.parametrize("run", FUNCTIONS)
@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"repeat_iters": 0}, ValueError, "repeat_iters"),
        ({"num_iters": -1}, ValueError, "repeat_iters"),
        ({"dry_run_iters": -1}, ValueError, "dry_run_iters"),
        ({"repeat_iters": 1, "num_iters": 1}, TypeError, "num_iters"),
        ({"input_args": (1,), "args": (1,)}, TypeError, "input_args"),
        ({"dry_run_time_ms": 0}, ValueError, "dry_run_time_ms"),
        ({"repeat_time_ms": float("nan")}, ValueError, "repeat_time_ms"),
        ({"l2_flush_size_mb": 0}, ValueError, "l2_flush_size_mb"),
    ],
)
def test_bad_arguments_are_refused_by_name(device, run, options, error, name):
    with pytest.raises(error, match=name):
        run(lambda: None, **options)


def test_bad_graph_length_and_function(device):
    with pytest.raises(ValueError, match="num_iters_within_graph"):
        testing.bench_gpu_time_with_cudagraph(lambda: None, num_iters_within_graph=0)
    with pytest.raises(TypeError, match="fn must be callable"):
        testing.bench_gpu_time(3)


def test_l2_flush_is_the_former_name_of_cold_l2_cache(device):
    with pytest.warns(DeprecationWarning, match="cold_l2_cache"):
        testing.bench_gpu_time(lambda: device.work(1.0), l2_flush=False, repeat_iters=2)
    assert device.flushes == 0


def test_flush_buffer_has_the_asked_size(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = dict.fromkeys(
        ["dry_run_iters", "repeat_iters", "num_iters", "args", "input_kwargs", "l2_flush"]
    )
    options |= dict(dry_run_time_ms=1, repeat_time_ms=1, input_args=(), aggregate_op=max)
    options |= dict(cold_l2_cache=True, sleep_after_run=False, l2_flush_size_mb=3)
    request = timers.checked_request("t", print, options | dict(l2_flush_device="cpu"))
    assert request.flush.__self__.numel() == 3 << 20


def test_set_seed_repeats_every_generator():
    import random

    import numpy as np

    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    testing.set_seed(5)
    first = draw()
    testing.set_seed(5)
    assert draw() == first
    testing.set_seed(6)
    assert draw() != first


@pytest.mark.parametrize("aggregate, wanted", [(max, [3.0, 5.0]), (min, [1.0, 2.0])])
def test_ranks_are_combined_call_by_call(monkeypatch, aggregate, wanted):
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)

    def gather(into, mine):
        into[:] = [mine, [3.0, 2.0]]

    monkeypatch.setattr(distributed, "all_gather_object", gather)
    assert timers._across_ranks([1.0, 5.0], aggregate) == wanted


def test_copy_bandwidth_counts_both_directions(device, monkeypatch):
    from flashinfer.testing import roofline

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(roofline, "_COPY_BYTES", 1 << 16)
    real_empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, device=None, **options: real_empty(*size, **options)
    )
    monkeypatch.setattr(
        roofline, "bench_gpu_time_with_cudagraph", lambda fn, **options: [0.5, 0.25, 1.0]
    )
    roofline.copy_bandwidth_tb_per_sec.cache_clear()
    try:
        measured = roofline.copy_bandwidth_tb_per_sec(0)
        assert measured == pytest.approx(2 * (1 << 16) / (0.5e-3 * 1e12))
        monkeypatch.setattr(roofline, "_COPY_BYTES", 7)
        assert roofline.copy_bandwidth_tb_per_sec(0) == measured, "measured once"
    finally:
        roofline.copy_bandwidth_tb_per_sec.cache_clear()


def test_rates():
    from flashinfer.testing import roofline

    assert roofline.tb_per_sec(3e9, 1.0) == pytest.approx(3.0)
    assert roofline.tflops_per_sec(2e12, 1000.0) == pytest.approx(2.0)
    assert roofline.percent(1.0, 4.0) == 25.0
