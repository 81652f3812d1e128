"""Folders of prebuilt modules for a wheel: the same bytes for the same inputs, and a table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ..version import __version__
from . import cache, files, nvrtc_compile
from .errors import JitError

TABLE = "modules.json"
_KEPT = {cache.MANIFEST}


def make_reproducible(folder: Path, created: int) -> None:
    """Take from a folder of modules what differs from build to build.

    These are times, logs with the paths of the build, and names of temporary files in the symbol
    tables.

    Parameters
    ----------
    folder : Path
        As `flashinfer.aot` fills it.
    created : int
        The time that manifests have, in seconds since 1970.

    Raises
    ------
    JitError
        If a module is damaged, or `strip` fails.
    """
    for home in sorted(folder.iterdir()):
        for place in cache.entry_folders(home):
            entry = cache.checked_entry(place)
            for file in place.iterdir():
                if file != entry.library and file.name not in _KEPT:
                    file.unlink()
            _strip(entry.library)
            manifest = entry.manifest | {
                "created": created,
                "library_size": entry.library.stat().st_size,
                "library_sha256": files.sha256(entry.library),
            }
            text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
            (place / cache.MANIFEST).write_text(text)


def _strip(library: Path) -> None:
    """Remove symbols from a library; one with appended cubins was built without."""
    if library.read_bytes().endswith(nvrtc_compile.MAGIC):
        return
    done = subprocess.run(["strip", str(library)], capture_output=True, text=True)
    if done.returncode != 0:
        raise JitError(f"strip {library} failed: {done.stderr.strip()}")


def write_table(folder: Path, target: Path) -> dict[str, dict]:
    """Write name, architectures, size and hash of each module of a folder.

    Returns
    -------
    dict
        The table by module, as written: ``archs``, ``bytes``, ``sha256``.
    """
    entries = [entry for home in sorted(folder.iterdir()) for entry in cache.entries_of(home)]
    table = {
        entry.folder.parent.name: {
            "archs": entry.manifest["archs"],
            "bytes": entry.manifest["library_size"],
            "sha256": entry.manifest["library_sha256"],
        }
        for entry in entries
    }
    text = json.dumps({"version": __version__, "modules": table}, indent=1, sort_keys=True)
    target.write_text(text + "\n")
    return table
