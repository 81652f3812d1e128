"""The cache of compiled modules on disk: where a module lies, how it is found and published.

    <base>/.cache/flashinfer/<version>/<archs>/generated/<uri>/       rendered sources
    <base>/.cache/flashinfer/<version>/<archs>/cached_ops/<uri>/<content>-<archs>-<toolchain>/
        <uri>.so  manifest.json  build.ninja  build.log

A module appears by one rename of a private folder and is never changed afterwards, so readers
need no lock. Builders hold the lock of the `<uri>` folder; whatever private folder one finds
under that lock belongs to a builder that was killed, and is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.util
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..compilation_context import current_compilation_context
from ..version import __version__
from .errors import JitError
from .fingerprint import Identity
from .log import logger

MANIFEST = "manifest.json"
_PRIVATE = ".build-"


# --- Where things lie -------------------------------------------------------------------------


def base_dir() -> Path:
    """Folder that holds `.cache/flashinfer`: the configured one, the home directory, or a
    private temporary folder where neither can be written."""
    if (configured := env.FLASHINFER_WORKSPACE_BASE.get()) is not None:
        return configured
    if home := env.HOME.get():
        return Path(home).absolute()
    return fallback_base("HOME is not set")


@functools.cache
def fallback_base(reason: str) -> Path:
    """A folder of this user under the temporary directory, for when the cache cannot be used."""
    folder = Path(tempfile.gettempdir()) / f"flashinfer-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise JitError(
            f"No folder for compiled modules: {reason}, and {folder} cannot be made ({error}).\n"
            "  hint: set FLASHINFER_WORKSPACE_BASE to a folder that can be written"
        ) from error
    # A stranger who made this predictable name first could plant a library there.
    owned = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not owned or status.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix=f"flashinfer-{os.getuid()}-"))
    logger.warning(
        "%s: compiled modules go to %s. Set FLASHINFER_WORKSPACE_BASE to keep them.", reason, folder
    )
    return folder


def version_dir(base: Path | None = None) -> Path:
    """Cache of this version of the package."""
    return (base or base_dir()) / ".cache" / "flashinfer" / __version__


def arch_dir(base: Path | None = None) -> Path:
    """Cache for the architectures that this process compiles for."""
    archs = [f"{major}{minor}" for major, minor in current_compilation_context.TARGET_CUDA_ARCHS]
    return version_dir(base) / ("_".join(sorted(archs, key=lambda a: (len(a), a))) or "no_gpu")


def jit_dir(base: Path | None = None) -> Path:
    """Folder of the compiled modules."""
    return arch_dir(base) / "cached_ops"


def generated_dir() -> Path:
    """Folder of rendered sources."""
    return arch_dir(writable_base()) / "generated"


def writable_base() -> Path:
    """The base in which modules can be built: the usual one, or the fallback."""
    base = base_dir()
    folder = version_dir(base)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return base
    return fallback_base(f"{folder} cannot be written")


# --- Finding a module -------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A compiled module on disk."""

    folder: Path
    library: Path
    manifest: dict


def read_entry(folder: Path) -> Entry | None:
    """The module in a folder, or None if the folder does not hold a complete one."""
    try:
        with open(folder / MANIFEST, encoding="utf-8") as file:
            manifest = json.load(file)
        library = folder / manifest["library"]
        # A copy that was cut short, or a crash before the data reached the disk.
        if os.stat(library).st_size != manifest["library_size"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(folder, library, manifest)


def find(uri: str, identity: Identity) -> Entry | None:
    """The module with this identity from the cache, compiled by the same toolchain."""
    homes = (jit_dir(base) / uri for base in _bases())
    return next((e for home in homes if (e := read_entry(home / identity.key))), None)


def find_of_any_toolchain(uri: str, identity: Identity) -> Entry | None:
    """The newest module in the cache with this content and these targets.

    For when nothing can be compiled here: whoever built it had some compiler that worked.
    """
    for base in _bases():
        same = [
            entry
            for entry in _entries(jit_dir(base) / uri)
            if entry.folder.name.startswith(identity.key_without_toolchain)
        ]
        if same:
            return max(same, key=lambda entry: entry.manifest.get("created", 0))
    return None


def find_prebuilt(uri: str, identity: Identity) -> Entry | None:
    """A prebuilt module with the same content that runs on at least the targets wanted here.

    Raises
    ------
    JitError
        If prebuilt modules of another version of FlashInfer are installed.
    """
    for root in prebuilt_roots():
        entries = _entries(root / uri)
        for entry in entries:
            _check_version(entry)
            built = entry.manifest.get("archs", ())
            covered = all(any(covers(b, wanted) for b in built) for wanted in identity.archs)
            if covered and entry.manifest.get("content") == identity.content:
                return entry
        if entries:
            logger.debug("prebuilt %s was built from other sources or targets", root / uri)
    return None


def covers(built: str, wanted: str) -> bool:
    """Whether code built for one target is meant for another: the same one, or its family."""
    if built == wanted:
        return True
    family, number = built.removesuffix("f"), wanted.rstrip("af")
    return built.endswith("f") and family[:-1] == number[:-1] and family <= number


def _check_version(entry: Entry) -> None:
    version = entry.manifest.get("version")
    if version != __version__ and not env.FLASHINFER_DISABLE_VERSION_CHECK.get():
        raise JitError(
            f"The prebuilt module {entry.folder} is of FlashInfer {version}, this is "
            f"{__version__}.\n  hint: install flashinfer-jit-cache=={__version__}, or set "
            "FLASHINFER_DISABLE_VERSION_CHECK=1 to use it where its sources are the same"
        )


def _bases() -> Iterator[Path]:
    """Where modules may lie; the fallback is made only if the usual place has not got it."""
    base = base_dir()
    yield base
    if (writable := writable_base()) != base:
        yield writable


def _entries(home: Path) -> list[Entry]:
    try:
        folders = [f for f in home.iterdir() if not f.name.startswith(".") and f.is_dir()]
    except OSError:
        return []
    return [entry for folder in sorted(folders) if (entry := read_entry(folder))]


def prebuilt_roots() -> list[Path]:
    """Folders of prebuilt modules: `FLASHINFER_AOT_DIR`, then `flashinfer_jit_cache`."""
    roots = [env.FLASHINFER_AOT_DIR.get(), jit_cache_package()]
    return [root for root in roots if root is not None]


@functools.cache
def jit_cache_package() -> Path | None:
    try:
        spec = importlib.util.find_spec("flashinfer_jit_cache")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) / "jit_cache" if places else None


# --- Publishing a module ----------------------------------------------------------------------


@contextlib.contextmanager
def building(home: Path, on_wait: Callable[[float], None]) -> Iterator[None]:
    """Hold the lock of a module's folder, and remove what killed builders left in it.

    The lock file stays for good: to delete it would let two builders hold two different files.
    """
    home.mkdir(parents=True, exist_ok=True)
    lock = os.open(home / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(lock)
    try:
        _acquire(lock, on_wait)
        for stale in home.glob(_PRIVATE + "*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield
    finally:
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


def _acquire(lock: int, on_wait: Callable[[float], None]) -> None:
    start = time.monotonic()
    pause = 0.01
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                # Without locks two processes may compile the same thing; the rename still
                # publishes one whole module.
                return logger.debug("no file locks here: %s", error)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN, errno.EINTR):
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
        on_wait(time.monotonic() - start)


def private_dir(home: Path) -> Path:
    """A fresh folder to build in, on the same file system as its destination."""
    folder = Path(tempfile.mkdtemp(dir=home, prefix=_PRIVATE))
    folder.chmod(0o755)  # mkdtemp is 0700; other users may share the cache
    return folder


def publish(private: Path, uri: str, identity: Identity) -> Entry:
    """Turn a private build folder into the module that everybody sees, by one rename."""
    library = private / f"{uri}.so"
    for leftover in private.iterdir():
        if leftover.suffix == ".o" or leftover.name.startswith(".ninja"):
            leftover.unlink()
    manifest = {
        "library": library.name,
        "library_size": library.stat().st_size,
        "created": time.time(),
        "version": __version__,
        "content": identity.content,
        "archs": list(identity.archs),
        "toolchain": identity.toolchain,
        "ingredients": identity.ingredients,
    }
    (private / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    target = private.parent / identity.key
    try:
        private.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if read_entry(target) is None:  # cut short: put it aside, under a name that gets swept
            target.rename(Path(tempfile.mkdtemp(dir=private.parent, prefix=_PRIVATE)) / "broken")
            private.rename(target)
    entry = read_entry(target)
    assert entry is not None, target
    return entry


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
        path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(scratch, 0o644)  # mkstemp makes it private
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def clear_cache_dir() -> None:
    """Remove every compiled module and rendered source of this version.

    Processes that have loaded modules keep them.
    """
    for base in _bases():
        folder = version_dir(base)
        if not folder.is_dir():
            continue
        for forgotten in folder.parent.glob(".trash-*"):
            shutil.rmtree(forgotten, ignore_errors=True)
        # Away in one step, so that nobody finds half a module.
        trash = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".trash-"))
        try:
            folder.rename(trash / folder.name)
        finally:
            shutil.rmtree(trash, ignore_errors=True)
