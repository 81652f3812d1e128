"""Files of the instruments: private to the user, and harmless to the program that is watched."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700


def private(path: str, flags: int) -> int:
    """Opener for :func:`open`: a file that it creates can be read by this user alone."""
    return os.open(path, flags, _PRIVATE_FILE)


def make_private_folder(path: Path) -> None:
    """Create a folder, and those that miss above it, for this user alone.

    Folders that are there keep their mode.
    """
    if not path.exists():
        make_private_folder(path.parent)
        path.mkdir(_PRIVATE_FOLDER, exist_ok=True)


class AppendedFile:
    """A file, pipe or device to which records are appended without ever waiting for a reader.

    Parameters
    ----------
    path : str
        It is opened at the first record, and created with its folder if it is missing.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._identity = (0, 0)
        self._is_cut = False  # the file ends in a part of a record

    def append(self, record: bytes) -> None:
        """Write a whole record and sync it to disk.

        Raises
        ------
        OSError
            If the record is not written, or only a part of it (the disk or a pipe is full).
        """
        if self._descriptor is None or not self._is_ours(self._descriptor):
            self._open()
        assert self._descriptor is not None
        rest = memoryview(b"\n" + record if self._is_cut else record)
        while rest:
            written = os.write(self._descriptor, rest)
            rest = rest[written:]
            self._is_cut = bool(rest)
        # A character device or a pipe has no disk to wait for.
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)

    def _open(self) -> None:
        make_private_folder(Path(self._path).parent)
        # O_NONBLOCK: a named pipe without a reader is an error at once, a full one as well.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
        self._descriptor = private(self._path, flags)
        status = os.fstat(self._descriptor)
        self._identity = (status.st_dev, status.st_ino)

    def _is_ours(self, descriptor: int) -> bool:
        """Whether the descriptor still leads to the file.

        A program that becomes a daemon closes all descriptors. The number may now be a file or a
        socket of its own.
        """
        try:
            status = os.fstat(descriptor)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity
