"""Building modules ahead of time, for machines that shall not compile.

    python -m flashinfer.aot --out-dir DIR        then there: FLASHINFER_AOT_DIR=DIR

The folder holds one sub-folder per module, laid out as in the cache. It may be moved. What is in
it comes from the registered generators; there is no list of modules here.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .compilation_context import current_compilation_context
from .jit import registry
from .jit.cache import read_entry
from .jit.core import JitError, JitSpec, build_jit_specs, check_cuda_arch


def select_modules(preset: str | None = None, patterns: Sequence[str] = ()) -> list[JitSpec]:
    """Modules to build for the current targets.

    Parameters
    ----------
    preset : str, optional
        A named set; by default the AOT cases of every generator.
    patterns : sequence of str
        Shell patterns of module names; one of them must match. Empty takes all.

    Raises
    ------
    ValueError
        If the preset does not exist or nothing matches.
    """
    specs = registry.preset_specs(preset) if preset else registry.aot_specs()
    if patterns:
        specs = [s for s in specs if any(fnmatch.fnmatchcase(s.name, p) for p in patterns)]
    if not specs:
        raise ValueError(f"no module matches preset {preset!r} and patterns {list(patterns)!r}")
    return specs


def detect_sm_capabilities() -> dict[str, bool]:
    """Whether modules are compiled for an architecture, by ``"sm75"`` to ``"sm121"``."""
    targets = {
        f"sm{major}{minor.rstrip('af')}"
        for major, minor in current_compilation_context.TARGET_CUDA_ARCHS
    }
    known = (75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121)
    return {f"sm{number}": f"sm{number}" in targets for number in known}


def parse_bool(s: str) -> bool:
    """A word of a command line: ``true`` or ``1``, ``false`` or ``0``, in any case.

    Raises
    ------
    ValueError
        If it is another.
    """
    words = {"true": True, "1": True, "false": False, "0": False}
    if s.lower() not in words:
        raise ValueError(f"`s` must be true, 1, false or 0, got {s!r}")
    return words[s.lower()]


def parse_head_dim(head_dim: str) -> tuple[int, int]:
    """Head sizes of a command line, ``"192,128"``: those of queries and of values.

    Raises
    ------
    ValueError
        If these are not two integers with a comma between.
    """
    parts = head_dim.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"`head_dim` must be two sizes such as '128,128', got {head_dim!r}")
    return int(parts[0]), int(parts[1])


def register_default_modules() -> int:
    """Describe the AOT cases of every registered generator to `jit_spec_registry`; their number.

    Generators count that `register_generator` marks. A function named ``gen_..._modules`` is not
    looked for: mark the generator of each module.
    """
    return len(registry.aot_specs())


def compile_and_package_modules(
    out_dir: Path | None, specs: Sequence[JitSpec] | None = None, verbose: bool | None = None
) -> None:
    """Compile modules, each if there is none in the cache or prebuilt, and copy them to a folder.

    Parameters
    ----------
    out_dir : Path, optional
        The folder; without one the cache alone is filled.
    specs : sequence of JitSpec, optional
        The modules; by default the AOT cases of every generator.
    verbose : bool, optional
        Log every command.
    """
    check_cuda_arch()
    specs = select_modules() if specs is None else specs
    build_jit_specs(specs, verbose)
    if out_dir is not None:
        copy_built_kernels(specs, out_dir)


def copy_built_kernels(jit_specs: Sequence[JitSpec], out_dir: Path) -> None:
    """Copy compiled modules from where they are to a folder that can serve as `FLASHINFER_AOT_DIR`.

    Earlier builds of the same modules in that folder are removed.

    Raises
    ------
    JitError
        If a module is not compiled.
    """
    for spec in jit_specs:
        entry = spec.find()
        if entry is None:
            raise JitError(f"{spec.name} has not been compiled.\n  hint: build it first")
        home = Path(out_dir) / spec.name
        home.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=home, prefix=".copy-"))
        copied = shutil.copytree(entry.folder, scratch / entry.folder.name)
        for old in home.iterdir():
            if old != scratch:
                shutil.rmtree(old)
        copied.rename(home / entry.folder.name)
        scratch.rmdir()
        assert read_entry(home / entry.folder.name) is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m flashinfer.aot", description=__doc__)
    parser.add_argument("--out-dir", type=Path, help="folder for the compiled modules")
    parser.add_argument("--preset", help="a named set instead of everything")
    parser.add_argument("--list", action="store_true", help="print the modules, build nothing")
    parser.add_argument("--verbose", action="store_true", help="show every command")
    parser.add_argument("patterns", nargs="*", help="shell patterns of module names")
    options = parser.parse_args(arguments)
    if not options.list and options.out_dir is None:
        parser.error("--out-dir is needed (or --list)")
    try:
        specs = select_modules(options.preset, options.patterns)
        if options.list:
            print("\n".join(spec.name for spec in specs))
            return 0
        compile_and_package_modules(options.out_dir, specs, options.verbose or None)
    except (JitError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    targets = sorted(f"{a}.{b}" for a, b in current_compilation_context.TARGET_CUDA_ARCHS)
    print(f"{len(specs)} modules for {', '.join(targets)} in {options.out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
