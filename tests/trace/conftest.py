"""Operations that a test registers are gone after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flashinfer._instrument.decorator import _TRACE_REGISTRY, traced_functions


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    lists: tuple[list[Any], ...] = (_TRACE_REGISTRY, traced_functions)
    before = [len(entries) for entries in lists]
    yield
    for entries, count in zip(lists, before, strict=True):
        del entries[count:]
