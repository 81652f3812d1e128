"""Makes a folder of cubins, for a repository or the wheel flashinfer-cubin.

NVRTC compiles modules as it does for a first call; their cubins are taken out of the libraries.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

from .. import env
from ..version import __version__
from . import binary, builder, cubins, nvrtc, nvrtc_compile, store
from .cubin_manifest import MANIFEST, file_name
from .errors import JitError
from .files import write_if_different
from .spec import ModuleSpec


def build(
    specs: Sequence[ModuleSpec], folder: Path, verbose: bool | None = None
) -> tuple[str, dict[str, str]]:
    """Compile the kernels of modules for the current targets, and list them in a manifest.

    Parameters
    ----------
    specs : sequence of ModuleSpec
        The modules.
    folder : Path
        What it has of other modules stays; older cubins of these are removed.
    verbose : bool, optional
        Log each command.

    Returns
    -------
    (sha256, left_out)
        Hash of the manifest, by which it is signed off; the modules that NVRTC does not compile,
        each with the reason.

    Raises
    ------
    JitError
        If nothing is left to compile, or a compiler fails.
    """
    with env.temporary("FLASHINFER_COMPILER", "nvrtc"):
        left_out = {}
        served = []
        for spec in specs:
            content = spec.identity(with_toolchain=False)
            part = spec.host_part(content)
            if part is None:
                left_out[spec.name] = nvrtc.why_not(*spec.host_key(content))
            elif part.kernels:
                served.append(spec)
        if not served:
            reasons = "\n".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise JitError(f"No kernels are left to compile.\n{reasons}".rstrip())
        builder.build(served, verbose, skip_prebuilt=False)
        for spec in served:
            _write(spec, folder)
    return write_manifest(folder), left_out


def _write(spec: ModuleSpec, folder: Path) -> None:
    entry = store.find(spec, prebuilt=False)
    if entry is None:
        raise JitError(f"{spec.name} was removed while its cubins were taken.\n  hint: try again")
    home = folder / __version__ / spec.name
    home.mkdir(parents=True, exist_ok=True)
    for old in home.glob("*.cubin"):
        old.unlink()
    for arch, cubin in cubins_of(entry.library.read_bytes()).items():
        (folder / file_name(spec.name, entry.manifest["content"], arch)).write_bytes(cubin)


def cubins_of(library: bytes) -> dict[str, bytes]:
    """The cubins that were appended to a host part, by target such as ``90a``."""
    trailer = struct.Struct(f"<Q{len(nvrtc_compile.MAGIC)}s")
    offset, magic = trailer.unpack(library[-trailer.size :])
    if magic != nvrtc_compile.MAGIC:
        raise ValueError("library must have appended cubins, got one without")
    elves = binary.device_elfs(library[offset : -trailer.size])
    return {arch.removeprefix("sm_"): elf for arch, _, elf in elves}


def copy(source: Path, target: Path) -> None:
    """Copy the cubins of this version that a folder lists, with their manifest.

    Raises
    ------
    JitError
        If there are none, or one is not what the manifest says.
    """
    listed = cubins.read_manifest(source)
    if not listed:
        raise JitError(f"{source} has no cubins of FlashInfer {__version__}.")
    for name, sha256 in listed.items():
        cubins.require_whole_file(source, source / name, sha256)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    shutil.copyfile(source / __version__ / MANIFEST, target / __version__ / MANIFEST)


def write_manifest(folder: Path) -> str:
    """List every cubin of this version under a folder; returns the manifest's SHA-256."""
    found = sorted((folder / __version__).glob("*/*.cubin"))
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in found
    ]
    text = "".join(lines)
    write_if_different(folder / __version__ / MANIFEST, text)
    return hashlib.sha256(text.encode()).hexdigest()
