"""Host parts: modules without their kernels, compiled when the wheel was made.

A host part has the launcher and the binding of one module. NVRTC compiles the kernels
(`nvrtc.py`), which are appended to a copy of it. They lie in `flashinfer/data/host/`, or in
`FLASHINFER_HOST_DIR`; `flashinfer build-host-parts FOLDER` builds them.

    <folder>/index.json     for each module: content of its identity, SHA-256, names of its kernels
    <folder>/<name>.so.xz
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..version import __version__
from . import env as jit_env
from . import files, trust
from .errors import DamagedError

INDEX = "index.json"
SERVED = ("act_and_mul", "norm", "page")
"""Families whose kernels have run on a GPU through NVRTC; the others are refused by name."""


@dataclass(frozen=True)
class HostPart:
    """A module without its kernels.

    Attributes
    ----------
    library : Path
        The library to which cubins are appended, compressed.
    sha256 : str
        Hash of that file.
    kernels : dict of str to str
        The C++ expression that names each kernel, by mangled name; empty for a module without
        device code.
    """

    library: Path
    sha256: str
    kernels: dict[str, str]

    def require_whole(self) -> None:
        """Raise if the library is not the one that was built.

        Raises
        ------
        DamagedError
            If its SHA-256 is not that of the index.
        UntrustedError
            If a stranger can have written it.
        """
        if not self.library.is_relative_to(jit_env.FLASHINFER_HOST_PARTS_DIR):
            trust.require_trusted([*trust.chain(self.library.parent, self.library.parent)])
        try:
            found = files.sha256(self.library)
        except OSError as error:
            found = error.strerror or str(error)
        if found != self.sha256:
            raise DamagedError(
                f"The host part {self.library} is damaged: its SHA-256 is {found}, the index says "
                f"{self.sha256}.\n  hint: install flashinfer-python=={__version__} again, or set "
                "FLASHINFER_COMPILER=nvcc"
            )


def is_served(name: str) -> bool:
    """Whether a module is of a family that NVRTC serves."""
    return any(name == family or name.startswith(f"{family}_") for family in SERVED)


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
    place = folder()
    known = read_index(place).get(name)
    if known is None or known["content"] != content:
        return None
    return HostPart(place / f"{name}.so.xz", known["sha256"], known["kernels"])


def why_not(name: str, content: str) -> str:
    """Why `find` has nothing for a module, as the end of a sentence."""
    place = folder()
    known = read_index(place).get(name)
    if known is None and not is_served(name):
        return f"its family is not served yet, only {', '.join(SERVED)} are"
    if known is None:
        return f"there is no prebuilt host part of it in {place}"
    if known["content"] != content:
        return "its prebuilt host part was compiled from other sources or flags"
    return "its host part is there"


def read_index(place: Path) -> dict[str, dict]:
    """The index of a folder of host parts, by name of the module; empty where there is none."""
    path = str(place / INDEX)
    try:
        return _read_index(path, files.stamp_of(os.stat(path)))
    except OSError:
        return {}


@functools.lru_cache(maxsize=4)
def _read_index(path: str, stamp: files.Stamp) -> dict[str, dict]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    parts = found.get("parts") if isinstance(found, dict) else None
    return {name: part for name, part in (parts or {}).items() if _is_part(part)}


def _is_part(part: object) -> bool:
    return (
        isinstance(part, dict)
        and isinstance(part.get("content"), str)
        and isinstance(part.get("sha256"), str)
        and isinstance(part.get("kernels"), dict)
    )


def write_index(place: Path, parts: dict[str, dict]) -> None:
    """Write the index of a folder of host parts."""
    text = json.dumps({"version": __version__, "parts": parts}, indent=1, sort_keys=True)
    files.write_if_different(place / INDEX, text + "\n")
