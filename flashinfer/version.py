"""Version and commit of the package: the checkout's, or those recorded when it was built."""

from __future__ import annotations

import importlib
from pathlib import Path


def _read() -> tuple[str, str]:
    root = Path(__file__).resolve().parent.parent
    try:
        meta = importlib.import_module("flashinfer._build_meta")
        version, commit = meta.__version__, meta.__git_version__
    except ImportError:
        version, commit = "unknown", "unknown"
    # A checkout may be newer than the metadata of its editable install.
    if (root / "build_backend.py").is_file() and (root / "version.txt").is_file():
        version = (root / "version.txt").read_text().strip()
    return version, commit


__version__, __git_version__ = _read()
