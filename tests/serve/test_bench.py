"""The benchmark of the serving example, on an engine and a clock whose times are known."""

from __future__ import annotations

import json
import math

import pytest

from examples.serve import bench
from examples.serve.traces import Arrival, make_trace
from tests.serve.fake_engine import FakeEngine


class Clock:
    """Seconds that pass when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "nothing to wait for"
        self.now += seconds


def replay(
    trace: list[Arrival], step: float = 0.25, **engine
) -> tuple[FakeEngine, bench.Recording]:
    clock = Clock()
    fake = FakeEngine(on_step=lambda: clock.sleep(step), **engine)
    return fake, bench.replay(fake, trace, vocab_size=50, clock=clock, sleep=clock.sleep)


def test_times_of_a_small_trace():
    """Two requests in turn on an engine of one: steps of 0.25 s, the second comes at 0.5 s."""
    trace = [Arrival(0.0, 5, 4), Arrival(0.5, 7, 2), Arrival(10.0, 1, 1)]
    fake, recording = replay(trace, max_batch_size=1)
    assert [r.tokens for r in recording.requests] == [
        [0.25, 0.5, 0.75, 1.0],
        [1.25, 1.5],
        [10.25],
    ]
    assert [r.reason for r in recording.requests] == ["length"] * 3
    numbers = bench.summarize(recording)
    assert numbers["ttft_median_ms"] == 250 and numbers["itl_p99_ms"] == 250
    assert numbers["ttft_p99_ms"] == pytest.approx(250 + 0.98 * 500)
    assert numbers["seconds"] == 10.25
    assert numbers["output_tokens_per_s"] == pytest.approx(7 / 10.25)
    assert numbers["tokens_per_s"] == pytest.approx((7 + 13) / 10.25)
    # Three pages of 64 while each of the first two runs; a finished request holds none.
    assert numbers["kv_peak"] == pytest.approx(3 / 64)
    assert numbers["pages_leaked"] == 0 and numbers["finished"] == 3
    assert [len(prompt) for prompt, _ in fake.seen] == [5, 7, 1]
    assert all(0 <= token < 50 for prompt, _ in fake.seen for token in prompt)
    assert all(p.ignore_eos and p.temperature == 0 for _, p in fake.seen)


def test_only_compiling_during_the_replay_counts():
    fake = FakeEngine()
    fake.on_step = lambda: setattr(fake, "compile_seconds", 4.0)
    assert bench.replay(fake, [Arrival(0.0, 1, 1)], vocab_size=2).compile_seconds == 2.5


def test_everybody_is_answered_refused_or_cancelled():
    trace = make_trace(
        "skewed", 400, rate=20, scale=0.05, output_tokens=6, cancel_share=0.3, seed=1
    )
    fake, recording = replay(trace, num_pages=16, page_size=16)
    numbers = bench.summarize(recording)
    too_long = sum(a.prompt_tokens + 6 > 16 * 16 for a in trace)
    assert too_long > 0 and numbers["refused"] == too_long
    assert numbers["cancelled"] > 50 and numbers["unanswered"] == 0
    assert numbers["finished"] + numbers["cancelled"] + too_long == 400
    assert fake.pages_free == 16 and numbers["pages_leaked"] == 0 and not fake.has_work
    for arrival, request in zip(trace, recording.requests, strict=True):
        if request.reason.startswith("refused"):
            assert "do not fit" in request.reason and not request.tokens
        elif arrival.cancel_after is None:
            assert (request.reason, len(request.tokens)) == ("length", 6)
        else:
            assert (request.reason, len(request.tokens)) == ("cancelled", arrival.cancel_after)
        assert request.tokens == sorted(request.tokens)
        assert all(t > arrival.time for t in request.tokens)


def test_a_leak_shows():
    _, recording = replay([Arrival(0.0, 5, 4)])
    recording.pages_free -= 2
    assert bench.summarize(recording)["pages_leaked"] == 2


def test_nothing_measured_is_nan_in_the_summary_and_null_in_json(tmp_path):
    _, recording = replay([Arrival(0.0, 10**4, 1)])
    numbers = bench.summarize(recording)
    assert math.isnan(numbers["ttft_median_ms"]) and numbers["refused"] == 1
    bench.write_json(tmp_path / "times.json", {"constant": recording})
    content = json.loads((tmp_path / "times.json").read_text())["constant"]
    assert content["summary"]["ttft_median_ms"] is None and content["summary"]["refused"] == 1
    assert content["requests"][0]["reason"].startswith("refused: prompt")


def test_table_and_plot(tmp_path):
    recordings = {
        kind: replay(make_trace(kind, 5, scale=0.01, output_tokens=3))[1]
        for kind in ("constant", "uniform")
    }
    text = bench.table({kind: bench.summarize(r) for kind, r in recordings.items()})
    lines = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines()}
    assert lines["ttft median ms"] == ["250", "250"] and lines["finished"] == ["5", "5"]
    assert "constant" in text.splitlines()[0] and "uniform" in text.splitlines()[0]
    pytest.importorskip("matplotlib")
    bench.plot(tmp_path / "times.png", recordings)
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
