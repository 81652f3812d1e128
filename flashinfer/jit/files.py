"""Files and folders of the cache: made for one writer, hashed, brought to the disk, removed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

# A change in the same tick of the kernel's clock leaves the times of a file as they were.
_TICK_NS = 100_000_000
_BUFFER_BYTES = 1 << 17

Stamp = tuple[int, int, int, int, int]
_hashes: dict[str, tuple[Stamp, str]] = {}


def stamp_of(status: os.stat_result) -> Stamp:
    """What differs if a file was replaced or written: nobody can set a change time."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def has_settled(status: os.stat_result) -> bool:
    """Whether the next write to a file is sure to change its stamp."""
    return time.time_ns() - status.st_ctime_ns > _TICK_NS


def sha256(path: Path) -> str:
    """SHA-256 of a file; it is read once in a process, unless it changes."""
    known = _hashes.get(str(path))
    if known and known[0] == stamp_of(os.stat(path)):
        return known[1]
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        found = _digest(file)
    if has_settled(status):
        _hashes[str(path)] = stamp_of(status), found
    return found


def copy(path: Path, descriptor: int) -> str:
    """Write a file to an open one; returns the SHA-256 of exactly what was written."""
    with open(path, "rb", buffering=0) as file, open(descriptor, "wb", closefd=False) as target:
        return _digest(file, target)


def _digest(file: io.FileIO, copy_to: io.BufferedWriter | None = None) -> str:
    # A small buffer stays in the processor's cache, which halves the time.
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    state = hashlib.sha256()
    while count := file.readinto(buffer):
        state.update(buffer[:count])
        if copy_to is not None:
            copy_to.write(buffer[:count])
    return state.hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder and its parents such that, whatever the umask, only the owner can write."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for part in reversed(missing):
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o755)
        if not part.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(part))


def forbid_others_to_write(folder: Path) -> None:
    """Take from group and world the right to write a folder and the files in it."""
    for path in (folder, *folder.iterdir()):
        mode = path.stat().st_mode
        if mode & 0o022:
            path.chmod(stat.S_IMODE(mode) & ~0o022)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot
            raise
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a folder as far as possible, also one that its owner may not list."""
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        with contextlib.suppress(OSError):
            folder.unlink()
        return
    with contextlib.suppress(OSError):
        folder.chmod(0o700)
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def write_if_different(path: str | Path, content: str) -> None:
    """Write a generated source, atomically, unless it already has this content.

    Parameters
    ----------
    path : path
        The file; its folder is made if need be.
    content : str
        What it must contain.
    """
    path = Path(path)
    try:
        if path.read_text(encoding="utf-8") == content:
            return
    except (OSError, UnicodeDecodeError):
        make_folder(path.parent)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(scratch, 0o644)  # mkstemp makes it private
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
