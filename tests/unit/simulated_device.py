"""A GPU that only takes time, for tests of what measures time. The fixture is for import."""

import contextlib
import itertools
import types

import pytest

from flashinfer.testing import timers

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
