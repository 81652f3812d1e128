"""Publishing compiled modules in the cache, and removing them."""

from __future__ import annotations

import contextlib
import errno
import json
import tempfile
import time
import uuid
from pathlib import Path

from ..version import __version__
from . import files, locks, places, trust
from .cache import MANIFEST, entry_folders, read_entry
from .fingerprint import Identity


def private_dir(home: Path) -> Path:
    """A fresh folder to build in, on the same file system as its destination."""
    folder = Path(tempfile.mkdtemp(dir=home, prefix=locks.PRIVATE))
    folder.chmod(0o755)  # mkdtemp is 0700; other users may share the cache
    return folder


def publish(private: Path, uri: str, identity: Identity) -> None:
    """Turn a private build folder into the module that everybody sees, by one rename.

    It survives a loss of power: what the rename makes visible is on the disk before.
    """
    library = private / f"{uri}.so"
    for leftover in private.iterdir():
        if leftover.suffix == ".o" or leftover.name.startswith(".ninja") or leftover.is_symlink():
            leftover.unlink()
    manifest = {
        "library": library.name,
        "library_size": library.stat().st_size,
        "library_sha256": files.sha256(library),
        "created": time.time(),
        "version": __version__,
        "content": identity.content,
        "archs": list(identity.archs),
        "toolchain": identity.toolchain,
        "ingredients": identity.ingredients,
    }
    (private / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    files.forbid_others_to_write(private)
    for path in (library, private / MANIFEST, private):
        files.sync(path)
    target = private.parent / identity.key
    try:
        private.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if _is_whole(target):
            return  # somebody else published it, where there are no locks
        set_aside(target)
        private.rename(target)
    files.sync(target.parent)


def _is_whole(folder: Path) -> bool:
    """Whether an entry is what its builder published, and nobody else can have written it."""
    entry = read_entry(folder, verify=True)
    try:
        return entry is not None and not any(
            trust.writers(path.stat()) for path in (folder, folder / MANIFEST, entry.library)
        )
    except OSError:  # a folder that may not be searched
        return False


def set_aside(folder: Path) -> None:
    """Rename a broken entry to a name that the next builder sweeps, and remove it if possible.

    The new name has the same parent: a folder without permissions can be renamed only there.
    """
    broken = folder.with_name(f"{locks.PRIVATE}broken-{uuid.uuid4().hex[:8]}")
    folder.rename(broken)
    files.remove_tree(broken)


def clear_cache_dir() -> None:
    """Remove the compiled modules and rendered sources of this version.

    Processes that have loaded modules keep them. A module that somebody compiles right now is
    published nevertheless: its builder is not disturbed.
    """
    for base in places.bases():
        folder = places.version_dir(base)
        if not folder.is_dir():
            continue
        for forgotten in folder.parent.glob(".trash-*"):
            files.remove_tree(forgotten)
        # Away in one step each, so that nobody finds half a module.
        trash = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".trash-"))
        try:
            for home in folder.glob("*/cached_ops/*"):
                with locks.unless_building(home) as idle:
                    for old in [home] if idle else entry_folders(home):
                        _throw(old, trash)
            for old in (*folder.glob("*/generated"), *folder.glob("*.json")):
                _throw(old, trash)
        finally:
            files.remove_tree(trash)
        for empty in (*folder.glob("*/cached_ops"), *folder.glob("*"), folder):
            with contextlib.suppress(OSError):  # somebody builds in it
                empty.rmdir()


def _throw(path: Path, trash: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process clears too
        path.rename(trash / uuid.uuid4().hex)
