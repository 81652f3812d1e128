"""Folders of prebuilt modules, as FlashInfer names them, and whether their code runs on a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..compilation_context import current_compilation_context
from ..version import __version__
from . import cache, places

_ARCHITECTURE = re.compile(r"sm_?(\d+)(\d)([af]?)")
# How well code with this suffix fits a device that is not named exactly alike.
_FIT = {"": 1, "f": 2, "a": 3}


@dataclass(frozen=True)
class AOTArtifact:
    """A prebuilt library and its targets, such as ``sm90a``; None for a module without kernels."""

    provider_id: str
    path: Path
    cuda_architectures: frozenset[str] | None


@dataclass(frozen=True)
class AOTProvider:
    """A folder of prebuilt modules: the package flashinfer_jit_cache, or `FLASHINFER_AOT_DIR`."""

    provider_id: str
    distribution: str
    version: str
    jit_cache_dir: Path
    cuda_architectures: frozenset[str]
    modules: frozenset[str]


def cuda_binary_target_compatibility_score(
    binary_target: str, device_architecture: str
) -> tuple[int, int] | None:
    """How well compiled code fits a device.

    Parameters
    ----------
    binary_target : str
        What it was compiled for: ``sm80`` (runs on this and later minor versions), ``sm100f``
        (the same within its family), ``sm90a`` (runs on this alone).
    device_architecture : str
        The device, with the suffix of what it is compiled for by default, such as ``sm90a``.

    Returns
    -------
    tuple of (int, int) or None
        The larger, the better; None if it does not run there.

    Raises
    ------
    ValueError
        If one of them is no architecture.
    """
    major, minor, suffix = _parsed("binary_target", binary_target)
    device_major, device_minor, device_suffix = _parsed("device_architecture", device_architecture)
    is_same = (major, minor) == (device_major, device_minor)
    if major != device_major or minor > device_minor or (suffix == "a" and not is_same):
        return None
    return (4 if is_same and suffix == device_suffix else _FIT[suffix], minor)


def _parsed(name: str, architecture: str) -> tuple[int, int, str]:
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        raise ValueError(f"{name} must be an architecture such as sm90a, got {architecture!r}")
    return int(match[1]), int(match[2]), match[3]


def _architectures(entry: cache.Entry) -> frozenset[str]:
    return frozenset(f"sm{arch}" for arch in entry.manifest["archs"] if "+" not in arch)


def get_aot_providers() -> tuple[AOTProvider, ...]:
    """The folders of prebuilt modules, in the order in which they are looked at."""
    providers = []
    for root in places.prebuilt_roots():
        entries = [entry for home in sorted(root.glob("*")) for entry in cache.entries_of(home)]
        versions = sorted({entry.manifest["version"] for entry in entries})
        is_package = root == places.jit_cache_package()
        providers.append(
            AOTProvider(
                provider_id=_provider_id(root),
                distribution="flashinfer-jit-cache" if is_package else "",
                version=" ".join(versions) or __version__,
                jit_cache_dir=root,
                cuda_architectures=frozenset().union(*map(_architectures, entries)),
                modules=frozenset(entry.folder.parent.name for entry in entries),
            )
        )
    return tuple(providers)


def _provider_id(root: Path) -> str:
    return "flashinfer-jit-cache" if root == places.jit_cache_package() else str(root)


def get_aot_artifacts(module_name: str) -> tuple[AOTArtifact, ...]:
    """The prebuilt libraries of a module that run on the targets of this process, the best of each.

    Whether they have the sources of this package is not looked at: a call does that.

    Parameters
    ----------
    module_name : str
        Name of the module.

    Returns
    -------
    tuple of AOTArtifact
        Without repetition, in the order of the targets; empty if there is none.
    """
    found = [
        AOTArtifact(_provider_id(root), entry.library, _architectures(entry) or None)
        for root in places.prebuilt_roots()
        for entry in cache.entries_of(root / module_name)
    ]
    targets = sorted(f"sm{a}{b}" for a, b in current_compilation_context.TARGET_CUDA_ARCHS)
    best = (max(found, key=lambda a: _fit(a, target), default=None) for target in targets)
    pairs = zip(targets, best, strict=True)
    return tuple(dict.fromkeys(a for target, a in pairs if a and _fit(a, target) > (0, 0)))


def _fit(artifact: AOTArtifact, target: str) -> tuple[int, int]:
    """How well a library fits a target; (0, 0) if it does not."""
    if artifact.cuda_architectures is None:
        return (1, 0)
    scores = (
        cuda_binary_target_compatibility_score(built, target)
        for built in artifact.cuda_architectures
    )
    return max((score for score in scores if score), default=(0, 0))
