"""Makes the import of the package quick."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Create objects that stay, and are not garbage to be looked for.

    A full collection while the package is imported visits all that PyTorch has made: 90 of 165 ms.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
