"""Version and commit of the package: the checkout's, or those recorded when it was built."""

from __future__ import annotations

import importlib
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
# A checkout may be newer than the metadata of its editable install.
_IS_CHECKOUT = (_ROOT / "build_backend.py").is_file() and (_ROOT / "version.txt").is_file()


def _recorded(name: str) -> str:
    try:
        return getattr(importlib.import_module("flashinfer._build_meta"), name, "unknown")
    except ImportError:
        return "unknown"


def _checked_out_commit() -> str | None:
    """Commit in `.git`, read without running git; None if it is not plainly there."""
    git = _ROOT / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        reference = head.removeprefix("ref: ")
        if (git / reference).is_file():
            return (git / reference).read_text().strip()
        for line in (git / "packed-refs").read_text().splitlines():
            if line.endswith(f" {reference}"):
                return line.split()[0]
    except OSError:
        pass
    return None


__version__: str = (
    (_ROOT / "version.txt").read_text().strip() if _IS_CHECKOUT else _recorded("__version__")
)
__git_version__: str
__git_commit__: str  # the same
__cubins_sha256__: str  # of the manifest of cubins that the package was built with, or "unknown"


def __getattr__(name: str) -> str:
    """`__git_version__` is looked up when it is asked for: an import does not need it."""
    if name in ("__git_version__", "__git_commit__"):
        checked_out = _checked_out_commit() if _IS_CHECKOUT else None
        return checked_out or _recorded("__git_version__")
    if name == "__cubins_sha256__":
        return _recorded(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
