"""A program: builds modules one after the other and prints what each cost.

`compare-compilers` starts it once per compiler, in a cache of its own.

    python -m flashinfer.cli.cold_build MODULE ...

It prints a line of JSON per module: ``name``, ``cpu_seconds`` of all processes of its build and
``library``.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence

from .modules import find_specs


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(names: Sequence[str]) -> None:
    """Build and print."""
    for spec in find_specs(names):
        before = _children_seconds()
        spec.build()
        seconds = _children_seconds() - before
        built = {"name": spec.name, "cpu_seconds": seconds, "library": str(spec.get_library_path())}
        print(json.dumps(built), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
