"""Operations that a test registers are gone after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashinfer.api_logging import _TRACE_REGISTRY


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = len(_TRACE_REGISTRY)
    yield
    del _TRACE_REGISTRY[before:]
