"""Host parts: modules without their kernels, compiled when the wheel was made.

A host part has the launcher and the binding of one module. NVRTC compiles the kernels
(`nvrtc.py`), which are appended to a copy of it. They lie in `flashinfer/data/host/`, or in
`FLASHINFER_HOST_DIR`; `flashinfer build-host-parts FOLDER` builds them. With `--long-kernels` those
for which NVRTC takes longest lie there, too.

    <folder>/index.json     hashes of the archives; for each module: content of its identity, where
                            its library is in which archive, SHA-256, names of its kernels and
                            bytes of their parameters; the same of its cubins by target, if any
    <folder>/<hash>.xz      libraries, or cubins, one after the other, compressed as one: alike ones
                            take little
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from .. import env
from ..version import __version__
from . import binary, files, trust
from . import env as jit_env
from .cubin_manifest import driver_loads
from .errors import DamagedError

INDEX = "index.json"


@dataclass(frozen=True)
class Packed:
    """A file in an archive.

    Attributes
    ----------
    archive : Path
        The archive.
    archive_sha256 : str
        Hash of the archive.
    offset, size : int
        The file's place in the unpacked archive, in bytes.
    sha256 : str
        Hash of the file.
    """

    archive: Path
    archive_sha256: str
    offset: int
    size: int
    sha256: str

    def arguments(self) -> list[str]:
        """The arguments by which `nvrtc_compile.py` finds the file."""
        return [str(self.archive), str(self.offset), str(self.size)]

    def require_whole(self) -> None:
        """Raise if the archive is not the one that was built.

        Raises
        ------
        DamagedError
            If its SHA-256 is not that of the index.
        UntrustedError
            If a stranger can have written it.
        """
        if not self.archive.is_relative_to(jit_env.FLASHINFER_HOST_PARTS_DIR):
            trust.require_trusted([*trust.chain(self.archive.parent, self.archive.parent)])
        try:
            found = files.sha256(self.archive)
        except OSError as error:
            found = error.strerror or str(error)
        if found != self.archive_sha256:
            raise DamagedError(
                f"The host parts {self.archive} are damaged: their SHA-256 is {found}, the index "
                f"says {self.archive_sha256}.\n  hint: install flashinfer-python=={__version__} "
                "again, or set FLASHINFER_COMPILER=nvcc"
            )


@dataclass(frozen=True)
class HostPart:
    """A module without its kernels.

    Attributes
    ----------
    library : Packed
        Launcher and binding, to which cubins are appended.
    kernels : dict of str to str
        The C++ expression that names each kernel, by mangled name; empty for a module without
        device code.
    parameters : dict of str to int
        Bytes of each kernel's parameters as the launcher passes them, by mangled name.
    cubins : dict of str to Packed
        Its kernels as NVRTC compiled them for a target such as ``90a``, as far as they are in an
        archive and the driver of this machine loads them.
    """

    library: Packed
    kernels: dict[str, str]
    parameters: dict[str, int]
    cubins: dict[str, Packed]

    def problem_of(self, library: Path) -> str:
        """Why kernels that were joined with this part do not fit it, or nothing.

        A launcher fills a kernel's parameters as its compiler lays them out. The driver takes as
        many bytes as the kernel declares and compares nothing.
        """
        for kernel in binary.read_kernels(library):
            expected = self.parameters.get(kernel.name)
            if kernel.parameter_bytes != expected:
                return (
                    f"error: {kernel.short_name} ({kernel.arch}) has {kernel.parameter_bytes} "
                    f"bytes of parameters, its launcher passes {expected}\n"
                )
        return ""


def folder() -> Path:
    """Where host parts are looked for."""
    return env.FLASHINFER_HOST_DIR.get() or jit_env.FLASHINFER_HOST_PARTS_DIR


def find(name: str, content: str) -> HostPart | None:
    """The host part of a module, if there is one that was compiled from the same sources.

    Parameters
    ----------
    name : str
        Name of the module.
    content : str
        Content of its identity: sources, headers, flags and ABI.
    """
    index = read_index(folder())
    known = index.parts.get(name)
    if known is None or known["content"] != content:
        return None
    cubins = known.get("cubins", {}).items()
    return HostPart(
        index.packed(folder(), known),
        known["kernels"],
        known["parameters"],
        {arch: index.packed(folder(), at) for arch, at in cubins if driver_loads(at["cuda"])},
    )


def why_not(name: str, content: str) -> str:
    """Why `find` has nothing for a module, as the end of a sentence."""
    known = read_index(folder()).parts.get(name)
    if known is None:
        return f"there is no prebuilt host part of it in {folder()}"
    if known["content"] != content:
        return "its prebuilt host part was compiled from other sources or flags"
    return "its host part is there"


@dataclass(frozen=True)
class Index:
    """The archives of a folder and the host parts in them.

    Attributes
    ----------
    archives : dict of str to str
        SHA-256 of each archive.
    parts : dict of str to dict
        ``content``, ``archive``, ``offset``, ``size``, ``sha256``, ``kernels``,
        ``parameters`` by name of the module; perhaps ``cubins``: by target ``archive``,
        ``offset``, ``size``, ``sha256``, ``cuda`` (the oldest CUDA whose drivers load it).
    """

    archives: dict[str, str] = field(default_factory=dict)
    parts: dict[str, dict] = field(default_factory=dict)

    def packed(self, place: Path, entry: Mapping[str, Any]) -> Packed:
        """A library or cubin of this index in its folder."""
        return Packed(
            place / entry["archive"],
            self.archives[entry["archive"]],
            *(entry[field] for field in ("offset", "size", "sha256")),
        )


def read_index(place: Path) -> Index:
    """The index of a folder of host parts; empty where there is none."""
    path = str(place / INDEX)
    try:
        return _read_index(path, files.stamp_of(os.stat(path)))
    except OSError:
        return Index()


@functools.lru_cache(maxsize=4)
def _read_index(path: str, stamp: files.Stamp) -> Index:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return Index()
    archives = found.get("archives") if isinstance(found, dict) else None
    parts = found.get("parts") if isinstance(found, dict) else None
    if not isinstance(archives, dict) or not isinstance(parts, dict):
        return Index()
    return Index(archives, {n: part for n, part in parts.items() if _is_part(part, archives)})


_PLACE = {"archive": str, "offset": int, "size": int, "sha256": str}
_PART = {"content": str, "kernels": dict, "parameters": dict, **_PLACE}
_CUBIN = {"cuda": int, **_PLACE}


def _is_part(part: object, archives: dict) -> bool:
    if not _has(part, _PART, archives):
        return False
    cubins = part.get("cubins", {})
    return isinstance(cubins, dict) and all(_has(c, _CUBIN, archives) for c in cubins.values())


def _has(entry: object, fields: Mapping[str, type], archives: dict) -> TypeGuard[dict]:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), kind) for name, kind in fields.items())
        and isinstance(archives.get(entry["archive"]), str)
    )


def write_index(place: Path, index: Index) -> None:
    """Write the index of a folder of host parts."""
    found = {"version": __version__, "archives": index.archives, "parts": index.parts}
    files.write_if_different(place / INDEX, json.dumps(found, indent=1, sort_keys=True) + "\n")
