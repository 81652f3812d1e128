"""Folders of the JIT, as module attributes that are computed when they are read.

- ``FLASHINFER_GEN_SRC_DIR``: generated sources (writable)
- ``FLASHINFER_JIT_DIR``: compiled modules (writable)
- ``FLASHINFER_CSRC_DIR``, ``FLASHINFER_INCLUDE_DIR``: sources of the package (never written)
- ``FLASHINFER_HOST_PARTS_DIR``: host parts of the package for NVRTC (never written)
- ``FLASHINFER_CUBIN_DIR``: cubins: the folder that is set, that of flashinfer_cubin, or the cache's
- ``FLASHINFER_AOT_DIR``: prebuilt modules, or None (never written)
- ``FLASHINFER_CACHE_DIR``, ``FLASHINFER_WORKSPACE_DIR``: what contains the writable ones
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import env
from . import places
from .aot_providers import AOTArtifact as AOTArtifact
from .aot_providers import AOTProvider as AOTProvider
from .aot_providers import (
    cuda_binary_target_compatibility_score as cuda_binary_target_compatibility_score,
)
from .aot_providers import get_aot_artifacts as get_aot_artifacts
from .aot_providers import get_aot_providers as get_aot_providers

_PACKAGE = Path(__file__).resolve().parent.parent


@functools.cache
def _data(name: str) -> Path:
    """`flashinfer/data/<name>` of an installed package, or `<name>` of a checkout."""
    installed = _PACKAGE / "data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def get_aot_path(module_name: str) -> Path:
    """Where prebuilt versions of a module are looked for.

    Raises
    ------
    FileNotFoundError
        If there are no prebuilt modules at all.
    """
    roots = places.prebuilt_roots()
    if not roots:
        raise FileNotFoundError(
            "no prebuilt modules: FLASHINFER_AOT_DIR is not set and flashinfer_jit_cache is not "
            "installed"
        )
    return next(
        (r / module_name for r in roots if (r / module_name).is_dir()), roots[0] / module_name
    )


def has_flashinfer_jit_cache() -> bool:
    """Whether the package of prebuilt modules is installed."""
    return places.jit_cache_package() is not None


def has_flashinfer_cubin() -> bool:
    """Whether the package of cubins is installed."""
    return places.cubin_package() is not None


def _cubin_dir() -> Path:
    package = places.cubin_package()
    return package if package and not env.FLASHINFER_CUBIN_DIR.is_set() else places.cubin_dir()


_FOLDERS: dict[str, Callable[[], Path | None]] = {
    "FLASHINFER_BASE_DIR": places.base_dir,
    "FLASHINFER_CACHE_DIR": lambda: places.version_dir().parent,
    "FLASHINFER_WORKSPACE_DIR": places.arch_dir,
    "FLASHINFER_JIT_DIR": lambda: places.jit_dir(places.writable_base()),
    "FLASHINFER_GEN_SRC_DIR": places.generated_dir,
    "FLASHINFER_CSRC_DIR": lambda: _data("csrc"),
    "FLASHINFER_INCLUDE_DIR": lambda: _data("include"),
    "FLASHINFER_DATA": lambda: _data("include").parent,
    "FLASHINFER_HOST_PARTS_DIR": lambda: _PACKAGE / "data" / "host",
    "FLASHINFER_CUBIN_DIR": _cubin_dir,
    "FLASHINFER_AOT_DIR": env.FLASHINFER_AOT_DIR.get,
}


# Only FLASHINFER_AOT_DIR may be None; `Any` spares the users of the others a check.
def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return _FOLDERS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FOLDERS])
