"""The timing functions against a simulated device: a clock that work advances, on any machine."""

import contextlib
import itertools
import types

import pytest
import torch

import flashinfer.testing as testing
from flashinfer.testing import cupti_trace, timers

FUNCTIONS = [
    testing.bench_gpu_time,
    testing.bench_gpu_time_with_cuda_event,
    testing.bench_gpu_time_with_cudagraph,
    testing.bench_gpu_time_with_cupti,
]
FLUSH_MS = 7.0


class Device:
    """A GPU that does nothing but take time; ``work`` is what kernels call."""

    def __init__(self):
        self.now = 0.0
        self.capturing = None
        self.flushes = 0
        self.cupti = None

    def work(self, ms, name="kernel"):
        if self.capturing is not None:
            self.capturing.append(ms)
            return
        start, self.now = self.now, self.now + ms
        if self.cupti is not None:
            self.cupti.kernel(start, self.now, name)

    def flush(self):
        self.flushes += 1
        self.work(FLUSH_MS, "flush")


class FakeEvent:
    def __init__(self, device, **_):
        self.device = device

    def record(self):
        self.at = self.device.now

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


class FakeStream:
    def wait_stream(self, other):
        pass


class FakeGraph:
    def __init__(self, device):
        self.device, self.nodes = device, []

    def replay(self):
        for ms in self.nodes:
            self.device.work(ms)


class FakeCupti:
    """Enough of ``cupti.cupti``: one launch record and one kernel record per piece of work."""

    ActivityKind = types.SimpleNamespace(
        RUNTIME=5, DRIVER=4, CONCURRENT_KERNEL=10, MEMCPY=1, MEMSET=2
    )

    def __init__(self, device, drop=0):
        self.device, self.clock = device, itertools.count(1)
        self.enabled, self.buffer, self.ids, self.drop = set(), [], itertools.count(100), drop
        device.cupti = self

    def get_timestamp(self):
        return next(self.clock)

    def activity_register_callbacks(self, requested, completed):
        assert requested() == (8 << 20, 0)
        self.completed = completed

    def activity_enable(self, kind):
        self.enabled.add(kind)

    def activity_disable(self, kind):
        self.enabled.remove(kind)

    def activity_flush_all(self, flag):
        self.completed(self.buffer[self.drop :])
        self.buffer = []

    def kernel(self, start, end, name):
        if 10 not in self.enabled:
            return
        correlation = next(self.ids)
        self.buffer.append(
            types.SimpleNamespace(kind=5, start=self.get_timestamp(), correlation_id=correlation)
        )
        self.buffer.append(
            types.SimpleNamespace(
                kind=10,
                start=int(start * 1e6),
                end=int(end * 1e6),
                correlation_id=correlation,
                name=name,
            )
        )


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    cuda = timers.torch.cuda

    @contextlib.contextmanager
    def capture(graph):
        fake.capturing = graph.nodes
        yield
        fake.capturing = None

    for name, value in {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "Event": lambda **options: FakeEvent(fake, **options),
        "Stream": FakeStream,
        "current_stream": FakeStream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": lambda: FakeGraph(fake),
        "graph": capture,
    }.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(timers, "l2_cache_bytes", lambda device=None: 1000)
    flush = property(lambda request: fake.flush if request.cold_l2 else lambda: None)
    monkeypatch.setattr(timers.Request, "flush", flush)
    monkeypatch.setattr(timers, "_warned", set())
    monkeypatch.setattr(timers.time, "sleep", lambda seconds: None)
    return fake


@pytest.fixture
def cupti(device, monkeypatch):
    fake = FakeCupti(device)
    monkeypatch.setattr("flashinfer.testing.timers.load_cupti", lambda: fake)
    return fake


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


def test_graph_without_tensors_flushes_and_says_so(device):
    with pytest.warns(RuntimeWarning, match="no tensor in input_args"):
        times = testing.bench_gpu_time_with_cudagraph(lambda: device.work(3.0), repeat_iters=5)
    assert times == [3.0] * 5
    assert device.flushes > 5


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
