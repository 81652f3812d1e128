"""The logger of the JIT."""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable

from .. import env


class FlashInferJITLogger(logging.Logger):
    """A logger that can also say something only once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._said: set[Hashable] = set()

    def isEnabledFor(self, level: int) -> bool:
        if self.level != logging.NOTSET:
            return super().isEnabledFor(level)
        # Read on each record: a server may set the variable after the import.
        return level >= logging.getLevelName(env.FLASHINFER_LOGGING_LEVEL.get())

    def _once(self, level: int, message: str, args: tuple[Hashable, ...]) -> None:
        if (level, message, args) not in self._said and self.isEnabledFor(level):
            self._said.add((level, message, args))
            self._log(level, message, args, stacklevel=3)

    def debug_once(self, msg: str, *args: Hashable) -> None:
        self._once(logging.DEBUG, msg, args)

    def info_once(self, msg: str, *args: Hashable) -> None:
        self._once(logging.INFO, msg, args)

    def warning_once(self, msg: str, *args: Hashable) -> None:
        self._once(logging.WARNING, msg, args)


class _StderrHandler(logging.Handler):
    """Writes to standard error, unless the application has set up logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _make_logger() -> FlashInferJITLogger:
    created = FlashInferJITLogger("flashinfer.jit")
    created.parent = logging.getLogger()
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("[flashinfer] %(message)s"))
    created.addHandler(handler)
    return created


logger = _make_logger()
