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

import torch

from .api_logging import _TRACE_REGISTRY
from .dtypes import short_name
from .trace.template import Tensor, templates_of

ARCHITECTURES = (
    "7.5", "8.0", "8.6", "8.9", "9.0a", "10.0a", "10.3a", "11.0a", "12.0a", "12.1a",
)  # fmt: skip
"""What kernels are written for; the tests compile every unit for each of these."""

RUN_ON = {"9.0a": "H200"}
"""Where the GPU tests are run and speed is measured."""


def operations() -> list[tuple[str, str, str, list[str]]]:
    """Every public operation.

    Returns
    -------
    list of tuple
        (name, input dtypes, output dtypes, architectures), in the order of their names.
    """
    import flashinfer  # its public names register themselves

    found = {}
    for function, trace in _TRACE_REGISTRY:
        if getattr(flashinfer, function.__name__, None) is None:
            continue
        template = templates_of(trace)[0]
        inputs = next(v for v in template.inputs.values() if isinstance(v, Tensor))
        output = next(v for v in template.outputs.values() if isinstance(v, Tensor))
        archs = [arch for arch in ARCHITECTURES if _runs_on(function, arch)]
        row = (function.__name__, _dtypes(inputs), _dtypes(output) or "as input", archs)
        found[function.__name__] = row
    return [found[name] for name in sorted(found)]


def _runs_on(function: Callable[..., Any], arch: str) -> bool:
    major, minor = arch.rstrip("af").split(".")
    supported = getattr(function, "is_compute_capability_supported", None)
    return supported is None or supported(10 * int(major) + int(minor))


def _dtypes(tensor: Tensor) -> str:
    return ", ".join(short_name(getattr(torch, name)) for name in tensor.dtypes or ())


def markdown() -> str:
    """The table in Markdown, with its legend."""
    headers = ["operation", "input", "output"]
    headers += [f"SM{arch.replace('.', '')}" for arch in ARCHITECTURES]
    lines = [_row(headers), _row(["---"] * len(headers))]
    for name, inputs, output, archs in operations():
        marks = ["–" if a not in archs else "●" if a in RUN_ON else "○" for a in ARCHITECTURES]
        lines.append(_row([f"`{name}`", inputs, output, *marks]))
    tested = ", ".join(f"SM{arch.replace('.', '')} on {gpu}" for arch, gpu in RUN_ON.items())
    lines += [
        "",
        f"● compiled, tested and measured ({tested}); ○ compiled by the tests, not run; – no.",
    ]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


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


_MARKED = re.compile(
    r"(<!-- operations: [^\n]* -->\n).*?(<!-- end of operations -->)", flags=re.DOTALL
)


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(rewrite(file.read_text()))
    if len(sys.argv) == 1:
        print(markdown(), end="")
