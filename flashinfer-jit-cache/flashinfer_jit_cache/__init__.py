"""Compiled modules of flashinfer-python, in `jit_cache/`; it looks here before it compiles.

`python -m flashinfer_jit_cache` lists them with their sizes.
"""

import json
from pathlib import Path

_TABLE = json.loads((Path(__file__).parent / "modules.json").read_text())

__version__: str = _TABLE["version"]
"""The version of flashinfer-python that the modules belong to."""

modules: dict[str, dict] = _TABLE["modules"]
"""Architectures (``archs``), size (``bytes``) and hash (``sha256``) of each module."""


def get_jit_cache_dir() -> str:
    """Folder of the modules."""
    return str(Path(__file__).parent / "jit_cache")
