"""A program: builds and loads modules one after the other and prints what each cost.

`compare-compilers` starts it twice per compiler, in a cache of its own: the second run only loads.

    python -m flashinfer.cli.cold_build MODULE ...

It prints a line of JSON per module: ``name``, ``cpu_seconds`` of all processes of its build,
``seconds`` until it was loaded and ``library``.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence

from ..jit import registry


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(names: Sequence[str]) -> None:
    """Build, load and print."""
    import tvm_ffi  # noqa: F401  imported once by a process, not by each module

    known = {spec.name: spec for spec in registry.aot_specs()}
    # Presets are not looked up: one may have the name of a module.
    for spec in (known[name] for name in names):
        before, start = _children_seconds(), time.perf_counter()
        spec.build_and_load()
        built = {
            "name": spec.name,
            "cpu_seconds": _children_seconds() - before,
            "seconds": time.perf_counter() - start,
            "library": str(spec.get_library_path()),
        }
        print(json.dumps(built), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
