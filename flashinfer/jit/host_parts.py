"""Host parts: modules without their kernels, compiled when the wheel was made.

A host part has the launcher and the binding of one module. NVRTC compiles the kernels
(`nvrtc.py`), which are appended to a copy of it. They lie in `flashinfer/data/host/`, or in
`FLASHINFER_HOST_DIR`; `flashinfer build-host-parts FOLDER` builds them.

    <folder>/index.json     hashes of the archives; for each module: content of its identity, where
                            its library is in which archive, SHA-256, names of its kernels and
                            bytes of their parameters
    <folder>/<hash>.xz      libraries one after the other, compressed as one: alike ones take little
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from .. import env
from ..version import __version__
from . import binary, files, trust
from . import env as jit_env
from .errors import DamagedError

INDEX = "index.json"


@dataclass(frozen=True)
class HostPart:
    """A module without its kernels.

    Attributes
    ----------
    archive : Path
        The archive with the library to which cubins are appended.
    archive_sha256 : str
        Hash of that file.
    offset, size : int
        The library's place in the unpacked archive, in bytes.
    sha256 : str
        Hash of the library.
    kernels : dict of str to str
        The C++ expression that names each kernel, by mangled name; empty for a module without
        device code.
    parameters : dict of str to int
        Bytes of each kernel's parameters as the launcher passes them, by mangled name.
    """

    archive: Path
    archive_sha256: str
    offset: int
    size: int
    sha256: str
    kernels: dict[str, str]
    parameters: dict[str, int]

    def arguments(self) -> list[str]:
        """The arguments by which `nvrtc_compile.py` finds the library."""
        return ["--host", str(self.archive), str(self.offset), str(self.size)]

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
    return HostPart(
        folder() / known["archive"],
        index.archives[known["archive"]],
        *(known[field] for field in ("offset", "size", "sha256", "kernels", "parameters")),
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
        ``parameters`` by name of the module.
    """

    archives: dict[str, str] = field(default_factory=dict)
    parts: dict[str, dict] = field(default_factory=dict)


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


_FIELDS = {"content": str, "archive": str, "offset": int, "size": int, "sha256": str}


def _is_part(part: object, archives: dict) -> bool:
    return (
        isinstance(part, dict)
        and all(isinstance(part.get(name), kind) for name, kind in _FIELDS.items())
        and isinstance(archives.get(part["archive"]), str)
        and isinstance(part.get("kernels"), dict)
        and isinstance(part.get("parameters"), dict)
    )


def write_index(place: Path, index: Index) -> None:
    """Write the index of a folder of host parts."""
    found = {"version": __version__, "archives": index.archives, "parts": index.parts}
    files.write_if_different(place / INDEX, json.dumps(found, indent=1, sort_keys=True) + "\n")
