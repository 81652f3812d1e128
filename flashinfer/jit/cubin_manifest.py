"""Manifests of cubins, and checks of a cubin against its manifest and the driver.

    <root>/<version>/checksums.txt                      manifest, as `sha256sum` writes it
    <root>/<version>/<module>/<content>-<arch>.cubin    what NVRTC made for one target

The manifest names each file from the root on, version included; what it does not list is not
there. `content` is that of the host part (`host_parts.py`), so that kernels never meet a launcher
of other sources.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from ..version import __version__
from .errors import ArtifactError

MANIFEST = "checksums.txt"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S+)")
# Parts of a path that lead nowhere else.
_NAME = re.compile(r"[\w+.-]*\w(/[\w+.-]*\w)*")
_ARCH = re.compile(r"-(\d+)([af]?)\.cubin")
_ELF_HEADER = struct.Struct("<16s HHI QQQ I HHHHHH")


def parse_manifest(data: bytes, source: str | Path) -> dict[str, str]:
    """SHA-256 of each file that a manifest lists, by name.

    Parameters
    ----------
    data : bytes
        Lines of a hash, a blank, a blank or ``*``, and a name.
    source : str or Path
        Where it is from, for messages.

    Raises
    ------
    ArtifactError
        If a line is none, or a name leads out of the folder.
    """
    found = {}
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or not _NAME.fullmatch(match[2]) or match[2] in found:
            raise ArtifactError(f"{source} is no manifest: line {number} is {line[:120]!r}")
        found[match[2]] = match[1]
    return found


def require_version(listed: Mapping[str, str], version: str, source: str | Path) -> None:
    """Refuse a manifest that lists files of another version of this package.

    Raises
    ------
    ArtifactError
        With the version that it is of.
    """
    others = {name.partition("/")[0] for name in listed} - {version}
    if others:
        raise ArtifactError(
            f"{source} lists cubins of FlashInfer {', '.join(sorted(others))}, not of {version}.\n"
            f"  hint: take those of flashinfer-python=={version}"
        )


def file_name(module: str, content: str, arch: str, version: str = __version__) -> str:
    """Name of a cubin from the root on."""
    return f"{version}/{module}/{content}-{arch}.cubin"


def require_whole(name: str, data: bytes, sha256: str, source: str | Path) -> None:
    """Refuse bytes that are not the cubin that its manifest lists.

    Parameters
    ----------
    name : str
        As in the manifest.
    data : bytes
        The file.
    sha256 : str
        Its hash in the manifest.
    source : str or Path
        Where the bytes are from, for messages.

    Raises
    ------
    ArtifactError
        If they are truncated, changed, or code for another architecture than their name says.
    """
    if problem := problem_of(name, data, sha256):
        raise ArtifactError(f"{source} is refused: {problem}")


def problem_of(name: str, data: bytes, sha256: str) -> str | None:
    """What is wrong with a cubin, as the end of a sentence."""
    found = hashlib.sha256(data).hexdigest()
    whole = _bytes_needed(data)
    if found != sha256:
        if len(data) < whole:
            return f"it is truncated to {len(data)} of {whole} bytes"
        return f"it is corrupted: its SHA-256 is {found}, the manifest says {sha256}"
    wanted = _ARCH.search(name)
    if wanted is None or not whole:
        return None  # another kind of file
    built = _architecture(data)
    if built != int(wanted[1]):
        return f"it has code for sm_{built}, its name says sm_{wanted[1]}{wanted[2]}"
    return None


def _bytes_needed(data: bytes) -> int:
    """The size of an ELF file by its header; 0 for something else."""
    if data[:4] != b"\x7fELF":
        return 0
    if len(data) < _ELF_HEADER.size:
        return _ELF_HEADER.size
    fields = _ELF_HEADER.unpack_from(data)
    programs, sections = fields[5], fields[6]
    _, program_size, program_count, section_size, section_count, _ = fields[8:]
    return max(programs + program_size * program_count, sections + section_size * section_count)


def _architecture(cubin: bytes) -> int:
    """The compute capability of a cubin, such as 90; since CUDA 13 it is the flags' second byte."""
    flags = _ELF_HEADER.unpack_from(cubin)[7]
    return (flags >> 8) & 0xFF if needed_cuda(cubin) >= 13 else flags & 0xFF


def needed_cuda(cubin: bytes) -> int:
    """The major version of CUDA whose drivers load a cubin; its header is enough.

    Drivers of CUDA 12 refuse the ABI of CUDA 13.
    """
    return 13 if cubin[:4] == b"\x7fELF" and cubin[8:9] >= b"\x08" else 12


def driver_loads(cuda: int) -> bool:
    """Whether cubins of a major version of CUDA work here; True where there is no driver."""
    found = driver_cuda()
    return found is None or cuda <= found


@functools.cache
def driver_cuda() -> int | None:
    """The major version of CUDA that the driver is of; None where there is no driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if status == 0 else None
