"""Kernels that were compiled elsewhere: a module is joined from its host part and its cubins.

Neither NVRTC nor nvcc is needed then. Cubins lie under `FLASHINFER_CUBIN_DIR` (by default a folder
of the cache) or in the package flashinfer_cubin, as `cubin_manifest.py` says, or beside the host
part (`host_parts.py`). docs/security.md says who is trusted.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..version import __version__
from . import cpp_ext, files, host_parts, nvrtc, places, trust
from .cubin_manifest import (
    MANIFEST,
    driver_loads,
    file_name,
    needed_cuda,
    parse_manifest,
    problem_of,
    require_version,
)
from .errors import ArtifactError, JitError
from .host_parts import HostPart, Packed
from .log import logger


@dataclass(frozen=True)
class CubinFile:
    """A cubin that is a file, which has been checked.

    Attributes
    ----------
    path : Path
        The file.
    sha256 : str
        Its hash.
    """

    path: Path
    sha256: str


@dataclass(frozen=True)
class Prebuilt:
    """A module that no compiler is needed for.

    Attributes
    ----------
    name : str
        Name of the module.
    part : HostPart
        Launcher and binding.
    cubins : dict of str to CubinFile or Packed
        Its kernels by target; empty for a module without any.
    """

    name: str
    part: HostPart
    cubins: Mapping[str, CubinFile | Packed]

    def ingredients(self) -> dict[str, str]:
        """Identity of the files that are joined."""
        import tvm_ffi

        hashes = {f"cubin {arch}": cubin.sha256 for arch, cubin in self.cubins.items()}
        return {"host part": self.part.library.sha256, "tvm_ffi": tvm_ffi.__version__, **hashes}

    def links(self) -> dict[str, str]:
        """Folders that need a link to stand for them: none, unlike for nvcc."""
        return {}

    def problem_of(self, library: Path) -> str:
        """Why the kernels of the result do not fit its launcher, or nothing."""
        return self.part.problem_of(library)

    def require_whole(self) -> None:
        """Raise if an archive is damaged, or a stranger can have written it."""
        for packed in (self.part.library, *self.cubins.values()):
            if isinstance(packed, Packed):
                packed.require_whole()

    def command(self) -> list[str]:
        """The command that joins the module, without its output."""
        words = [sys.executable, "-I", "-S", str(nvrtc.PROGRAM)]
        words += ["--host", *self.part.library.arguments()]
        for arch, cubin in self.cubins.items():
            if isinstance(cubin, Packed):
                words += ["--packed-cubin", arch, *cubin.arguments()]
            else:
                words += ["--cubin", arch, str(cubin.path)]
        return words

    def text(self, folder: str = "") -> str:
        """The whole of `build.ninja`, with the output in a folder."""
        escape = cpp_ext.ninja_path
        output = f"{escape(folder)}/" if folder else ""
        words = shlex.join(self.command()).replace("$", "$$")
        return (
            f"ninja_required_version = 1.8\n\nrule join\n  command = {words} --out $out\n\n"
            f"build {output}{escape(self.name)}.so: join {escape(str(self.part.library.archive))}\n"
        )


def find(name: str, content: str, archs: Sequence[str]) -> Prebuilt | None:
    """The host part and the cubins of a module, if all of them are there and whole.

    A cubin that is refused is passed over with a warning that says why; compilers serve then.

    Parameters
    ----------
    name : str
        Name of the module.
    content : str
        Content of its identity.
    archs : sequence of str
        Its targets, such as ``90a``.

    Raises
    ------
    ArtifactError
        If flashinfer_cubin is of another version.
    UntrustedError
        If a stranger can have written a cubin.
    """
    if env.FLASHINFER_COMPILER.get() != "auto":
        return None
    part = host_parts.find(name, content)
    if part is None:
        return None
    if not part.kernels:
        return Prebuilt(name, part, {})
    for root in places.cubin_roots():
        try:
            if found := _find_in(root, name, content, archs):
                return Prebuilt(name, part, found)
        except ArtifactError as refusal:
            logger.warning_once("Prebuilt kernels of %s are passed over: %s", name, str(refusal))
    if part.cubins.keys() >= set(archs):
        return Prebuilt(name, part, {arch: part.cubins[arch] for arch in archs})
    return None


def _find_in(
    root: Path, name: str, content: str, archs: Sequence[str]
) -> dict[str, CubinFile] | None:
    """Each target's cubin under a root; None unless all are listed there."""
    version = version_in(root)
    listed = read_manifest(root, version)
    found = {}
    for arch in archs:
        file = file_name(name, content, arch, version)
        if file not in listed:
            return None
        found[arch] = CubinFile(root / file, listed[file])
    for cubin in found.values():
        require_whole_file(root, cubin.path, cubin.sha256)
        with open(cubin.path, "rb") as opened:
            needed = needed_cuda(opened.read(64))
        if not driver_loads(needed):
            raise ArtifactError(f"{cubin.path} needs a driver of CUDA {needed}")
    return found


def version_in(root: Path) -> str:
    """The version whose cubins count under a root: this one, or that of an installed package.

    Raises
    ------
    JitError
        If flashinfer_cubin is of another version, and the version check is on.
    """
    if root != places.cubin_package() or (root / __version__).is_dir():
        return __version__
    version = next((path.parent.name for path in sorted(root.glob(f"*/{MANIFEST}"))), "unknown")
    if not env.FLASHINFER_DISABLE_VERSION_CHECK.get():
        raise JitError(
            f"flashinfer-cubin is of FlashInfer {version}, this is {__version__}.\n"
            f"  hint: install flashinfer-cubin=={__version__}, or set "
            "FLASHINFER_DISABLE_VERSION_CHECK=1 to use it where its sources are the same"
        )
    return version


def read_manifest(root: Path, version: str = __version__) -> dict[str, str]:
    """SHA-256 by name from the manifest under a root; empty without a manifest.

    Raises
    ------
    ArtifactError
        If it is damaged, or of another version.
    """
    path = root / version / MANIFEST
    try:
        return _read_manifest(str(path), version, files.stamp_of(os.stat(path)))
    except OSError:
        return {}


@functools.lru_cache(maxsize=8)
def _read_manifest(path: str, version: str, stamp: files.Stamp) -> dict[str, str]:
    with open(path, "rb") as file:
        listed = parse_manifest(file.read(), path)
    require_version(listed, version, path)
    return listed


def require_whole_file(root: Path, path: Path, sha256: str) -> None:
    """Refuse a cubin on disk that is damaged, of another target, or that a stranger can write.

    Raises
    ------
    ArtifactError
        As :func:`require_whole`, or if the file cannot be read.
    UntrustedError
        If it is in no package, and somebody else can have written it.
    """
    if root != places.cubin_package():
        manifest = path.parents[1] / MANIFEST
        trust.require_trusted([*trust.chain(path.parent, root), manifest, path])
    try:
        problem = _problem_on_disk(path, sha256, files.stamp_of(os.stat(path)))
    except OSError as error:
        problem = f"it cannot be read ({error.strerror})"
    if problem:
        raise ArtifactError(f"{path} is refused: {problem}")


@functools.lru_cache(maxsize=4096)
def _problem_on_disk(path: Path, sha256: str, stamp: files.Stamp) -> str | None:
    return problem_of(f"{path.parent.name}/{path.name}", path.read_bytes(), sha256)
