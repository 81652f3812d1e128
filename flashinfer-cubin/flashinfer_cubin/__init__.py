"""Compiled kernels of flashinfer-python, in `cubins/`; it joins modules from them.

`flashinfer list-cubins` lists them.
"""

from pathlib import Path

CUBIN_DIR = Path(__file__).parent / "cubins"
"""Folder of the cubins and of their manifest."""

(__version__,) = (manifest.parent.name for manifest in CUBIN_DIR.glob("*/checksums.txt"))
"""The version of flashinfer-python that the cubins belong to."""


def get_cubin_dir() -> str:
    """Folder of the cubins and of their manifest."""
    return str(CUBIN_DIR)


def list_cubins() -> list[str]:
    """Names of the cubins from that folder on."""
    return sorted(str(path.relative_to(CUBIN_DIR)) for path in CUBIN_DIR.rglob("*.cubin"))


def get_cubin_path(relative_path: str) -> str:
    """Path of a cubin by its name."""
    return str(CUBIN_DIR / relative_path)
