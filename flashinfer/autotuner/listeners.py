"""Who keeps answers of the tuner, and must forget them when they may change.

An operation that asks the tuner at every call would spend more time on the question than on its
launch, so it keeps the answers, and asks again when results or the mode change.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["call_on_change"]

_listeners: list[Callable[[], object]] = []


def call_on_change(listener: Callable[[], object]) -> None:
    """Call `listener` whenever results come or go, and when ``autotune()`` begins or ends."""
    _listeners.append(listener)


def tell() -> None:
    """Call the listeners."""
    for listener in _listeners:
        listener()
