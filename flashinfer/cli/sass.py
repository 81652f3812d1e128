"""`compare-sass`: whether two checkouts compile to the same machine code."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import click

from ..aot import select_modules
from ..compilation_context import current_compilation_context
from ..env import child_environment
from ..jit import build_jit_specs
from ..jit.binary import Kernel, read_code, read_kernels
from ..jit.cache import read_entry
from .failure import explained
from .modules import targets_option

DIFFERENT = 3
# 16 bytes an instruction; its lowest 12 bits are the opcode.
INSTRUCTION_BYTES = 16

Kernels = list[tuple[Kernel, bytes]]


def compare_kernels(old: Kernels, new: Kernels) -> list[str]:
    """Lines that say how the kernels of a module differ; none if all are equal.

    Kernels are matched by mangled name. Where types were renamed, kernels of one short name are
    matched by equal code and then in the order of the file: machine code holds no names and no
    addresses, branches are relative.
    """
    return [line for pair in _pairs(old, new) for line in _differences(*pair)]


def _pairs(
    old: Kernels, new: Kernels
) -> Iterator[tuple[tuple[Kernel, bytes] | None, tuple[Kernel, bytes] | None]]:
    rest_old = {(kernel.name, kernel.arch): (kernel, code) for kernel, code in old}
    rest_new: dict[tuple[str, str], list[tuple[Kernel, bytes]]] = defaultdict(list)
    for kernel, code in new:
        same = rest_old.pop((kernel.name, kernel.arch), None)
        if same is not None:
            yield same, (kernel, code)
        else:
            rest_new[kernel.short_name, kernel.arch].append((kernel, code))
    renamed: dict[tuple[str, str], list[tuple[Kernel, bytes]]] = defaultdict(list)
    for kernel, code in rest_old.values():
        renamed[kernel.short_name, kernel.arch].append((kernel, code))
    for key in renamed.keys() | rest_new.keys():
        before, after = renamed[key], rest_new[key]
        for one in list(before):
            equal = next((other for other in after if other[1] == one[1]), None)
            if equal is not None:
                before.remove(one)
                after.remove(equal)
                yield one, equal
        for i in range(max(len(before), len(after))):
            yield (before[i] if i < len(before) else None, after[i] if i < len(after) else None)


def _differences(
    old: tuple[Kernel, bytes] | None, new: tuple[Kernel, bytes] | None
) -> Iterator[str]:
    if new is None:
        if old is not None:
            yield f"{old[0].short_name} ({old[0].arch}): only before"
        return
    if old is None:
        yield f"{new[0].short_name} ({new[0].arch}): only now"
        return
    name = f"{new[0].short_name} ({new[0].arch})"
    for field in ("registers", "stack_bytes", "shared_bytes", "parameter_bytes"):
        before, after = getattr(old[0], field), getattr(new[0], field)
        if before != after:
            yield f"{name}: {field} {before} -> {after}"
    if old[1] != new[1]:
        yield f"{name}: {_code_difference(old[1], new[1])}"


def _code_difference(old: bytes, new: bytes) -> str:
    """Where two codes part, and which opcodes one has more of."""
    before, after = _instructions(old), _instructions(new)
    first = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    counts = Counter(map(_opcode, after))
    counts.subtract(Counter(map(_opcode, before)))
    more = ", ".join(f"{n:+d} of {op:#05x}" for op, n in sorted(counts.items()) if n)
    length = f"{len(before)} instructions"
    if len(before) != len(after):
        length = f"{len(before)} -> {len(after)} instructions"
    return f"{length}, from number {first} on; {more or 'the same opcodes'}"


def _instructions(code: bytes) -> list[bytes]:
    return [code[i : i + INSTRUCTION_BYTES] for i in range(0, len(code), INSTRUCTION_BYTES)]


def _opcode(instruction: bytes) -> int:
    return int.from_bytes(instruction[:2], "little") & 0xFFF


def read_module(library: Path) -> Kernels:
    """The kernels of a library with their machine code and constants."""
    code = read_code(library)
    return [(kernel, code[kernel.name, kernel.arch]) for kernel in read_kernels(library)]


def _baseline(path: Path, patterns: Sequence[str], scratch: Path) -> dict[str, Path]:
    """Libraries by module: of a folder that `python -m flashinfer.aot` filled, or of a checkout."""
    if (path / "flashinfer" / "aot.py").is_file():
        targets = " ".join(
            f"{major}.{minor}" for major, minor in current_compilation_context.TARGET_CUDA_ARCHS
        )
        changes = {"PYTHONPATH": str(path), "FLASHINFER_CUDA_ARCH_LIST": targets}
        command = [sys.executable, "-m", "flashinfer.aot", "--out-dir", str(scratch), *patterns]
        if subprocess.run(command, cwd=path, env=child_environment(changes)).returncode:
            raise ValueError(f"the modules of {path} could not be built; its own message is above")
        path = scratch
    entries = (read_entry(folder) for folder in sorted(path.glob("*/*")) if folder.is_dir())
    found = {entry.folder.parent.name: entry.library for entry in entries if entry is not None}
    if not found:
        raise ValueError(f"{path} is no checkout and holds no built modules")
    chosen = patterns or ("*",)
    return {n: library for n, library in found.items() if any(fnmatchcase(n, p) for p in chosen)}


def _report(baseline: Mapping[str, Path], libraries: Mapping[str, Path]) -> int:
    """Print what differs, and return how many modules do. A new one has nothing to differ from."""
    different = 0
    for name in sorted(baseline):
        if name in libraries:
            lines = compare_kernels(read_module(baseline[name]), read_module(libraries[name]))
        else:
            lines = ["only before"]
        different += bool(lines)
        for line in lines:
            click.echo(f"{name}: {line}")
    return different


@click.command("compare-sass")
@click.argument("baseline", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("patterns", nargs=-1)
@targets_option
@explained
def compare_sass(baseline: Path, patterns: tuple[str, ...]) -> None:
    """Compare the machine code of all ahead-of-time modules with that of BASELINE.

    BASELINE is another checkout, which is built first, or a folder that `python -m flashinfer.aot
    --out-dir` filled. PATTERNS choose modules by name. Prints each kernel whose instructions,
    constants, registers, stack or shared memory differ, and exits with 3 if any do.
    """
    specs = select_modules(patterns=patterns)
    with tempfile.TemporaryDirectory() as scratch:
        # First, since building ours takes long, and a folder without modules is soon refused.
        before = _baseline(baseline.resolve(), patterns, Path(scratch))
        build_jit_specs(specs)
        libraries = {spec.name: entry.library for spec in specs if (entry := spec.find())}
        different = _report(before, libraries)
    new = len(libraries.keys() - before.keys())
    click.echo(f"{len(before) - different} of {len(before)} modules are equal; {new} are new.")
    if different:
        raise click.exceptions.Exit(DIFFERENT)


COMMANDS = (compare_sass,)
