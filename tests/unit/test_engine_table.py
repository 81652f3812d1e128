"""The names that engines touch: each binds as they call it, or stands in docs/engines.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit import engine_table
from tests.unit.engine_table import FACTS, state, unbound_calls

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
PRESENT = [name for name in FACTS if state(name) != "absent"]


@pytest.mark.parametrize("name", PRESENT)
def test_every_call_binds(name: str) -> None:
    assert not unbound_calls(name)


def test_a_call_that_does_not_bind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"engines": {}, "sm90": True, "calls": [{"pos": 1, "kw": ["epsilon"]}, {"pos": 9}]}
    monkeypatch.setitem(FACTS, "flashinfer.rmsnorm", wrong)
    assert len(unbound_calls("flashinfer.rmsnorm")) == 2
    assert state("flashinfer.nothing") == "absent"
    assert state("flashinfer.shuffle_matrix_a") == "refuses"


def test_the_document_is_what_the_package_has() -> None:
    command = "python -m tests.unit.engine_table docs/engines.md"
    assert DOCUMENT.read_text() == engine_table.markdown(), f"run `{command}`"


def test_no_engine_finds_less_than_before() -> None:
    for engine, (before, total) in engine_table.BEFORE.items():
        found, names = engine_table.counts(engine, hopper_only=False)
        assert found >= before and abs(names - total) <= 40, (engine, found, names)
