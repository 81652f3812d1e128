"""Which tests run: samples are fixed, parts for several GPUs share the work, nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests import selection
from tests.progress import Progress, function_of
from tests.selection import (
    LEAST_CASES,
    LEAST_ON_A_GPU,
    SECONDS_OF_A_FUNCTION,
    affordable,
    costly_files_first,
    part,
    sample,
    sample_of_cases,
)


@dataclass(frozen=True)
class Item:
    """As much of a pytest.Item as the selection reads."""

    nodeid: str
    callspec: Any = field(default=None, compare=False)
    fixturenames: tuple[str, ...] = ("device",)

    def get_closest_marker(self, name: str) -> None:
        return None


def grid(**axes: range) -> list[Item]:
    values = [dict(zip(axes, row, strict=True)) for row in product(*axes.values())]
    return [
        Item(
            f"tests/a/test_a.py::test[{'-'.join(map(str, v.values()))}]", SimpleNamespace(params=v)
        )
        for v in values
    ]


def test_a_sample_is_fixed_and_has_every_value():
    items = grid(x=range(10), y=range(4), z=range(3))
    chosen = sample_of_cases(items, 30)
    assert 0.2 * len(items) <= len(chosen) <= 0.35 * len(items)
    for name, values in (("x", 10), ("y", 4), ("z", 3)):
        assert len({item.callspec.params[name] for item in chosen}) == values
    assert sample_of_cases(items[::-1], 30) == chosen
    more = sample_of_cases(items + [Item(f"{i.nodeid}-new", i.callspec) for i in items], 60)
    assert len(more & chosen) >= 0.7 * len(chosen), "new cases do not move the others"


def test_small_grids_and_lists_run_whole():
    assert len(sample(grid(x=range(2), y=range(LEAST_CASES // 2)))) == LEAST_CASES
    assert len(sample(grid(fault=range(50)))) == 50, "each value of the only parameter"
    without_device = [Item(i.nodeid, i.callspec, ()) for i in grid(x=range(10), y=range(10))]
    assert sample(without_device) == without_device


def test_a_gpu_runs_the_cases_that_it_can_afford():
    items = grid(x=range(10), y=range(10))
    assert affordable(items, lambda item: SECONDS_OF_A_FUNCTION / 100) == items
    chosen = affordable(items, lambda item: SECONDS_OF_A_FUNCTION / 25)
    assert len(chosen) == 25 and chosen == [item for item in items if item in chosen]
    for name in "xy":
        assert {item.callspec.params[name] for item in chosen} == set(range(10))
    few = affordable(grid(x=range(2), y=range(2)), lambda item: 100.0)
    assert len(few) == LEAST_ON_A_GPU


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_share_the_work(count: int):
    items = grid(x=range(20), y=range(20))
    costs = {item: 1 + (i * 7919) % 31 for i, item in enumerate(items)}
    parts = [part(items, i + 1, count, costs.__getitem__) for i in range(count)]
    assert sorted(i.nodeid for p in parts for i in p) == sorted(i.nodeid for i in items)
    sums = [sum(map(costs.__getitem__, p)) for p in parts]
    assert max(sums) - min(sums) <= max(costs.values())


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b"])
def test_a_wrong_share_is_refused(text: str):
    with pytest.raises(ValueError):
        selection._share(text)


def test_time_left_follows_the_cost_and_the_speed(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("tests.progress.time.monotonic", lambda: now[0])
    lines: list[str] = []
    reporter = SimpleNamespace(
        ensure_newline=lambda: None, write_line=lines.append, flush=lambda: None
    )
    config = SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin=lambda name: reporter),
        getoption=lambda name, default=None: 2,
    )
    tests = [f"tests/test_x.py::test_slow[{i}]" for i in range(10)] + ["tests/test_x.py::test_fast"]
    progress = Progress(
        config, {"tests/test_x.py::test_slow": 30.0, "tests/test_x.py::test_fast": 0.1}
    )
    progress.expect(tests)
    assert progress.time_left() == pytest.approx(300.1 / 2), "two workers at the table's speed"
    for test in tests[:9]:
        now[0] += 60.0  # four times slower than the table
        progress.pytest_runtest_logreport(
            SimpleNamespace(nodeid=test, when="teardown", failed=False)
        )
    assert 45 < progress.time_left() < 66
    assert lines[0] == "11 tests, 2 at a time; collected in 0 s"
    assert lines[-1].startswith("[ 90%] 9 of 11 tests; 9:00 gone, about ")
    assert function_of(tests[0]) == "tests/test_x.py::test_slow"


def test_expensive_tests_come_first_and_file_by_file():
    costs = {"a::quick": 0.1, "a::slow": 3.0, "b::slowest": 9.0, "c::slow": 4.0, "b::slow": 2.0}
    items = [Item(name) for name in costs]
    items.sort(key=costly_files_first(items, lambda item: costs[item.nodeid]))
    names = [item.nodeid for item in items]
    assert names == ["b::slowest", "b::slow", "c::slow", "a::slow", "a::quick"]
