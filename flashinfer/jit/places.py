"""Where modules lie: bases, versions, targets, and the fallback where nothing can be written."""

from __future__ import annotations

import functools
import importlib.util
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .. import env
from ..compilation_context import current_compilation_context
from ..version import __version__
from .errors import JitError
from .log import logger

_MAX_PATH = 4095  # bytes of a path that the kernel takes
_ROOM = 640  # bytes of it that names of modules, their keys and their files may need


def base_dir() -> Path:
    """Folder that holds `.cache/flashinfer`: the configured one, the home directory, or a
    private temporary folder where neither can be written."""
    if (configured := env.FLASHINFER_WORKSPACE_BASE.get()) is not None:
        return configured
    if home := env.HOME.get():
        try:
            return Path(home).absolute()
        except OSError as error:  # relative to a folder that was removed
            return fallback_base(f"HOME={home} cannot be used ({error.strerror})")
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
    return Path(f"{base or base_dir()}/.cache/flashinfer/{__version__}")


def arch_dir(base: Path | None = None) -> Path:
    """Cache for the architectures that this process compiles for."""
    archs = [f"{major}{minor}" for major, minor in current_compilation_context.TARGET_CUDA_ARCHS]
    label = "_".join(sorted(archs, key=lambda a: (len(a), a))) or "no_gpu"
    return Path(f"{version_dir(base)}/{label}")


def jit_dir(base: Path | None = None) -> Path:
    """Folder of the compiled modules."""
    return arch_dir(base) / "cached_ops"


def generated_dir() -> Path:
    """Folder of rendered sources."""
    return arch_dir(writable_base()) / "generated"


def writable_base() -> Path:
    """The base in which modules can be built: the usual one, or the fallback."""
    base = base_dir()
    why = _why_not_writable(version_dir(base))
    if why is None:
        return base
    configured = env.FLASHINFER_WORKSPACE_BASE.get()
    setting = f"FLASHINFER_WORKSPACE_BASE={base}" if configured == base else f"HOME={base}"
    return fallback_base(f"{setting}: {why}")


def _why_not_writable(folder: Path) -> str | None:
    """Why a folder cannot be made or filled, or None if it can."""
    if len(os.fsencode(folder)) > _MAX_PATH - _ROOM:
        return "the path is too long"
    while True:
        try:
            status = os.stat(folder)
            break
        except FileNotFoundError:
            if folder.is_symlink():
                return f"{folder} is a link that leads nowhere"
            folder = folder.parent
        except OSError as error:  # a parent that may not be searched, a circle of links
            return f"{folder} cannot be used ({error.strerror})"
    if stat.S_ISDIR(status.st_mode) and os.access(folder, os.W_OK | os.X_OK):
        return None
    return f"{folder} cannot be written"


def bases() -> Iterator[Path]:
    """Where modules may lie; the fallback is made only if the usual place has not got it."""
    base = base_dir()
    yield base
    if (writable := writable_base()) != base:
        yield writable


def prebuilt_roots() -> list[Path]:
    """Folders of prebuilt modules: `FLASHINFER_AOT_DIR`, then `flashinfer_jit_cache`."""
    roots = [env.FLASHINFER_AOT_DIR.get(), jit_cache_package()]
    return [root for root in roots if root is not None]


@functools.cache
def jit_cache_package() -> Path | None:
    """Folder of the modules in the package flashinfer_jit_cache, if it is installed."""
    return _folder_of_package("flashinfer_jit_cache", "jit_cache")


@functools.cache
def cubin_package() -> Path | None:
    """Folder of the cubins in the package flashinfer_cubin, if it is installed."""
    return _folder_of_package("flashinfer_cubin", "cubins")


def cubin_dir() -> Path:
    """Folder for downloaded cubins: `FLASHINFER_CUBIN_DIR`, else one of the cache."""
    return env.FLASHINFER_CUBIN_DIR.get() or version_dir().parent / "cubins"


def cubin_roots() -> list[Path]:
    """Folders of cubins in the order in which they are looked at."""
    package = cubin_package()
    return [cubin_dir(), *([package] if package else [])]


def _folder_of_package(package: str, folder: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) / folder if places else None
