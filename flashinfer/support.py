"""Which operation runs on which architecture: the table of README.md, made from the code.

    python -m flashinfer.support              print it
    python -m flashinfer.support README.md    put it between the marks of that file

An operation is a public function with a trace template. It runs wherever our kernels compile,
unless it declares its compute capabilities with `backend_requirement`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .api_logging import _TRACE_REGISTRY

ARCHITECTURES = (
    "7.5", "8.0", "8.6", "8.9", "9.0a", "10.0a", "10.3a", "11.0a", "12.0a", "12.1a",
)  # fmt: skip
"""What kernels are written for; the tests compile modules of every generator for each of these."""

_ON_HOPPER = (
    "activation",
    "cascade",
    "fused_norm",
    "norm",
    "page",
    "qk_norm_rope",
    "quantization",
    "rope",
    "rope_quantize",
)
TESTED = {("9.0a", family) for family in _ON_HOPPER}
"""Architecture and family whose GPU tests have been run there: 9.0a is an H200."""


def operations() -> list[tuple[str, str, list[str]]]:
    """Every public operation.

    Returns
    -------
    list of tuple
        (family, name, architectures), sorted.
    """
    import flashinfer  # its public names register themselves

    found = set()
    for function, _ in _TRACE_REGISTRY:
        if hasattr(flashinfer, function.__name__):
            archs = tuple(arch for arch in ARCHITECTURES if _runs_on(function, arch))
            family = function.__module__.split(".")[1].lstrip("_")
            found.add((family, function.__name__, archs))
    return [(family, name, list(archs)) for family, name, archs in sorted(found)]


def _runs_on(function: Callable[..., Any], arch: str) -> bool:
    major, minor = arch.rstrip("af").split(".")
    supported = getattr(function, "is_compute_capability_supported", None)
    return supported is None or supported(10 * int(major) + int(minor))


def markdown() -> str:
    """The table in Markdown, with its legend."""
    headers = ["family", "operation", *(f"SM{arch.replace('.', '')}" for arch in ARCHITECTURES)]
    lines = [_row(headers), _row(["---"] * len(headers))]
    previous = ""
    for family, name, archs in operations():
        marks = [_mark(arch, family, archs) for arch in ARCHITECTURES]
        lines.append(_row([family if family != previous else "", f"`{name}`", *marks]))
        previous = family
    lines += ["", "● tested on a GPU (SM90a: H200); ○ compiled by the tests, never run; – refused."]
    return "\n".join(lines) + "\n"


def _mark(arch: str, family: str, archs: list[str]) -> str:
    if arch not in archs:
        return "–"
    return "●" if (arch, family) in TESTED else "○"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


_MARKED = re.compile(
    r"(<!-- operations: [^\n]* -->\n).*?(<!-- end of operations -->)", flags=re.DOTALL
)


def rewrite(document: str) -> str:
    """The text of a document with the current table between the marks.

    Raises
    ------
    ValueError
        If the document has no marks.
    """
    new, count = _MARKED.subn(lambda m: f"{m[1]}\n{markdown()}\n{m[2]}", document)
    if count != 1:
        raise ValueError(f"expected one table between `<!-- operations`, got {count}")
    return new


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(rewrite(file.read_text()))
    if len(sys.argv) == 1:
        print(markdown(), end="")
