"""Work lists of captured calls of functions without plan, without a GPU."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer._attention.functions import single_plans as single
from flashinfer._attention.plan.launch import Workspaces

CPU = torch.device("cpu")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> single._Stream:
    plans = SimpleNamespace(streams={(CPU, 0): single._Stream()})
    monkeypatch.setattr(single, "_plans", plans)
    monkeypatch.setattr(single, "_captured", {})
    return plans.streams[CPU, 0]


def _add_plan(stream: single._Stream, key: single.Key, backend: str) -> list[torch.Tensor]:
    """Work lists with which calls are captured, as they come."""
    used: list[torch.Tensor] = []

    def move_workspaces(floats: torch.Tensor, ints: torch.Tensor) -> None:
        executor.workspaces = Workspaces(floats, ints)
        used.append(ints)

    executor: Any = SimpleNamespace(
        choice=SimpleNamespace(backend=backend),
        move_workspaces=move_workspaces,
        workspaces=Workspaces(torch.zeros(256), torch.arange(64)),
    )
    spare_list = executor.workspaces.ints.clone() if backend == "fa3" else None
    stream.plans[key] = single._Plan(executor, spare_list)
    return used


def test_each_capture_has_a_list_of_its_own(stream: single._Stream) -> None:
    used = _add_plan(stream, ("key",), "fa3")
    plan_list = stream.plans[("key",)].executor.workspaces.ints
    for _ in range(3):
        single._planned_before(("key",), CPU)
        assert torch.equal(used[-1], torch.arange(64))
        used[-1][0] = 99  # a launch counts in it
    assert len({plan_list.data_ptr(), *(ints.data_ptr() for ints in used)}) == 4


def test_the_first_list_lives_on(stream: single._Stream) -> None:
    """Later ones are memory of their graphs; this one would be anybody's."""
    used = _add_plan(stream, ("key",), "fa3")
    single._planned_before(("key",), CPU)
    first = weakref.ref(used.pop())
    single._planned_before(("key",), CPU)
    gc.collect()
    assert first() is not None


def test_lists_that_nobody_counts_in_are_shared(stream: single._Stream) -> None:
    used = _add_plan(stream, ("key",), "fa2")
    for _ in range(2):
        single._planned_before(("key",), CPU)
    assert used[0] is used[1]
