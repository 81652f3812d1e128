"""Who builds a module: a lock for each module's folder, and what a failed builder tells the others.

The lock file is ``<home>/.lock``. Whoever removes a home holds its lock, and whoever gets a lock
looks whether the file still lies there, so two builders never hold two different files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from . import files
from .errors import BuildError, JitError
from .log import logger

LOCK = ".lock"
PRIVATE = ".build-"
_FAILURE = "failed.json"
_MAX_ATTEMPTS = 1000  # to get a lock while others remove its folder


@contextlib.contextmanager
def building(home: Path, on_wait: Callable[[float], None]) -> Iterator[None]:
    """Hold the lock of a module's folder, and remove what killed builders left in it.

    Parameters
    ----------
    home : Path
        The module's folder; it is made if need be.
    on_wait : callable
        Called from time to time with the seconds that this process has waited.
    """
    lock = _take(home, on_wait)
    try:
        for stale in home.glob(PRIVATE + "*"):
            files.remove_tree(stale)
        yield
    finally:
        _release(lock)


@contextlib.contextmanager
def unless_building(home: Path) -> Iterator[bool]:
    """Hold the lock of a module's folder if nobody builds there; yields whether it is held."""
    try:
        lock = _open(home / LOCK, create=False)
    except OSError:
        yield not home.joinpath(LOCK).exists()
        return
    try:
        yield _try_lock(lock) and _is_at(lock, home / LOCK)
    finally:
        _release(lock)


def _take(home: Path, on_wait: Callable[[float], None]) -> int:
    start = time.monotonic()
    for _ in range(_MAX_ATTEMPTS):
        try:
            files.make_folder(home)
            lock = _open(home / LOCK, create=True)
        except FileNotFoundError:  # somebody clears the cache
            continue
        except PermissionError:
            if home.stat().st_uid != os.geteuid() or home.stat().st_mode & 0o700 == 0o700:
                raise
            home.chmod(0o755)
            continue
        try:
            _wait(lock, start, on_wait)
            if _is_at(lock, home / LOCK):
                return lock
        except BaseException:
            _release(lock)
            raise
        _release(lock)
    raise BuildError(f"{home} is removed again and again.\n  hint: try again later")


def _open(path: Path, create: bool) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    try:
        lock = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise BuildError(
                f"{path} is a link, where the cache has a lock file.\n  hint: remove that link"
            ) from error
        raise
    _held.add(lock)
    return lock


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(path))
    except FileNotFoundError:
        return False


def _wait(lock: int, start: float, on_wait: Callable[[float], None]) -> None:
    pause = 0.01
    while not _try_lock(lock):
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
        on_wait(time.monotonic() - start)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            # Without locks two processes may compile the same thing; the rename still publishes
            # one whole module.
            logger.debug("no file locks here: %s", error)
            return True
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN, errno.EINTR):
            raise
        return False
    return True


def _release(lock: int) -> None:
    if lock in _held:
        _held.remove(lock)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


# A lock lives as long as any copy of its descriptor: a worker that another thread forks during a
# build would keep it, and everybody who needs that module would wait for the worker's end.
_held: set[int] = set()


def _drop_locks() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_drop_locks)


# --- Failures that waiting processes share ------------------------------------------------------


def last_failure(home: Path) -> dict[str, str]:
    """The record of the last failed builder of a module: ``key``, ``message`` and ``token``."""
    try:
        found = json.loads((home / _FAILURE).read_text(encoding="utf-8"))
        if all(isinstance(found[name], str) for name in ("key", "message", "token")):
            return found
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return {}


def record_failure(home: Path, private: Path, key: str, error: JitError) -> None:
    """Tell those who wait for the lock that this build failed; best effort."""
    record = {"key": key, "message": str(error), "token": uuid.uuid4().hex}
    with contextlib.suppress(OSError):
        scratch = private / _FAILURE
        scratch.write_text(json.dumps(record), encoding="utf-8")
        scratch.replace(home / _FAILURE)


def shared_failure(home: Path, before: dict[str, str], key: str) -> BuildError | None:
    """The failure of a builder that ended while this process waited for the same module.

    Parameters
    ----------
    home : Path
        The module's folder.
    before : dict
        The answer of `last_failure` before this process waited.
    key : str
        The key of the module that this process wants.
    """
    now = last_failure(home)
    if now.get("key") != key or now.get("token") == before.get("token"):
        return None
    return BuildError(f"Another process compiled this while this one waited.\n{now['message']}")
