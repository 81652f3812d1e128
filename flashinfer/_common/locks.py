"""A lock for state that forks share."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """A lock that a forked child finds free, and that its own thread may take again.

    At a fork, another thread may hold the lock. The child has no such thread, so that nobody there
    would ever release it. A signal handler may run in the thread that holds the lock.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
