"""Shows users the progress of compilation."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .log import logger

_ANNOUNCE_AFTER = 0.3  # seconds; a build longer than a second has to say so within that second
_STATUS = re.compile(r"^\[(\d+)/(\d+)\] ")
_compile_seconds = 0.0


def compile_seconds() -> float:
    """Seconds that this process has spent on compiling modules, successfully or not."""
    return _compile_seconds


class Progress:
    """Announces a build that lasts, follows ninja's counter, and reports the time it took.

    Parameters
    ----------
    names : sequence of str
        The modules that are built.
    archs : str
        The architectures that they are built for.
    place : Path
        Where they go.
    """

    def __init__(self, names: Sequence[str], archs: str, place: Path) -> None:
        count = f"{len(names)} modules: " if len(names) > 1 else ""
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        self._what = f"{count}{shown} for {archs}"
        self._many = len(names) > 1
        self._place = place
        self._start = time.monotonic()
        self._announced = False
        self._bar: Any = None

    def tick(self) -> None:
        """To be called a few times a second."""
        if not self._announced and time.monotonic() - self._start > _ANNOUNCE_AFTER:
            self._announced = True
            logger.info("Compiling %s into %s", self._what, self._place)

    def line(self, text: str) -> None:
        """Take note of a line that ninja printed."""
        match = _STATUS.match(text)
        if not match or not self._many or not _on_terminal():
            return
        if self._bar is None:
            import tqdm

            self._bar = tqdm.tqdm(
                total=int(match[2]), unit="step", leave=False, desc="compiling", mininterval=0
            )
        self._bar.update(int(match[1]) - self._bar.n)

    def done(self, succeeded: bool) -> None:
        """Report the end, if the start was reported."""
        global _compile_seconds
        seconds = time.monotonic() - self._start
        _compile_seconds += seconds
        if self._bar is not None:
            self._bar.close()
        if self._announced:
            end = "Compiled" if succeeded else "Failed to compile"
            logger.info("%s %s in %.1f s", end, self._what, seconds)


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # of a daemon, which has none or has closed it
        return False


class Waiting:
    """Says, once, that another process is compiling what this one needs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = False

    def __call__(self, seconds: float) -> None:
        if not self._said and seconds > 1:
            self._said = True
            logger.info("Waiting for another process that is compiling %s", self._name)
