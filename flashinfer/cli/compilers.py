"""`compare-compilers`: machine code and cost of modules, of nvcc and of NVRTC."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import tabulate

from ..env import child_environment
from ..jit import registry
from .failure import explained
from .modules import find_specs, targets_option
from .sass import DIFFERENT, Kernels, compare_kernels, read_module

COMPILERS = ("nvcc", "nvrtc")
# A launcher relies on these sizes.
_LAYOUT = {"parameter_bytes": "bytes of parameters", "shared_bytes": "bytes of shared memory"}


@dataclass(frozen=True)
class Built:
    """A module as one compiler made it.

    Attributes
    ----------
    cpu_seconds : float
        User and system time of all processes of its build.
    cold_seconds, warm_seconds : float
        Time until it was loaded: built first, and taken from the cache by a later process.
    kernels : list of (Kernel, bytes)
        Its kernels with their machine code.
    """

    cpu_seconds: float
    cold_seconds: float
    warm_seconds: float
    kernels: Kernels


@dataclass(frozen=True)
class Comparison:
    """How the kernels of one module differ.

    Attributes
    ----------
    equal, kernels : int
        Kernels with the same machine code, and all of them.
    registers : int
        The largest change of a kernel's registers, with its sign.
    instructions : float
        The largest relative change of a kernel's instructions, with its sign.
    worse : list of str
        Kernels that only one path has, whose parameters or shared memory have other sizes, or that
        use more stack with NVRTC: they are no result of other addresses, and an error.
    """

    equal: int
    kernels: int
    registers: int
    instructions: float
    worse: list[str]


def compare(old: Kernels, new: Kernels) -> Comparison:
    """Compare the kernels of nvcc's path with those of NVRTC's, by mangled name."""
    before = {(kernel.name, kernel.arch): (kernel, code) for kernel, code in old}
    after = {(kernel.name, kernel.arch): (kernel, code) for kernel, code in new}
    worse = [f"{name} ({arch}) is in one of them" for name, arch in before.keys() ^ after.keys()]
    both = [(before[key], after[key]) for key in before.keys() & after.keys()]
    worse += [
        f"{a.short_name} ({a.arch}) uses {b.stack_bytes} bytes of stack, not {a.stack_bytes}"
        for (a, _), (b, _) in both
        if b.stack_bytes > a.stack_bytes
    ]
    worse += [
        f"{a.short_name} ({a.arch}) has {getattr(b, field)} {what}, not {getattr(a, field)}"
        for (a, _), (b, _) in both
        for field, what in _LAYOUT.items()
        if getattr(a, field) != getattr(b, field)
    ]
    return Comparison(
        equal=sum(not compare_kernels([a], [b]) for a, b in both),
        kernels=len(both),
        registers=max((b.registers - a.registers for (a, _), (b, _) in both), key=abs, default=0),
        instructions=max((len(b) / len(a) - 1 for (_, a), (_, b) in both), key=abs, default=0),
        worse=sorted(worse),
    )


def _builds(compiler: str, names: Sequence[str]) -> dict[str, Built]:
    """Build modules in an empty cache, one after the other, and load them once more."""
    with tempfile.TemporaryDirectory(prefix="flashinfer-cold-") as cache:
        changes = {"FLASHINFER_COMPILER": compiler, "FLASHINFER_WORKSPACE_BASE": cache}
        command = [sys.executable, "-m", "flashinfer.cli.cold_build", *names]
        cold, warm = (_lines(command, changes) for _ in range(2))
        return {
            one["name"]: Built(
                one["cpu_seconds"],
                one["seconds"],
                again["seconds"],
                read_module(Path(one["library"])),
            )
            for one, again in zip(cold, warm, strict=True)
        }


def _lines(command: Sequence[str], changes: dict[str, str]) -> list[dict]:
    done = subprocess.run(
        command, env=child_environment(changes), stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _row(name: str, nvcc: Built, nvrtc: Built, found: Comparison) -> tuple[str, ...]:
    both = (nvcc, nvrtc)
    return (
        f"`{name}`",
        *(f"{built.cpu_seconds:.2f}" for built in both),
        " / ".join(f"{built.cold_seconds:.2f}" for built in both),
        " / ".join(f"{built.warm_seconds * 1e3:.1f}" for built in both),
        f"{found.equal} of {found.kernels}",
        f"{found.registers:+d}",
        f"{found.instructions:+.0%}",
    )


@click.command("compare-compilers")
@click.argument("names", nargs=-1)
@targets_option
@explained
def compare_compilers(names: tuple[str, ...]) -> None:
    """Build modules with nvcc and with NVRTC, and compare machine code and time.

    NAMES are as for `build`; by default every ahead-of-time module. Modules without a host part are
    left out. "Cold" is from the request to the loaded module, "warm" the same in a later process.
    Exits with 3 if a kernel is missing on one path, takes other bytes of parameters or
    shared memory, or uses more stack with NVRTC.
    """
    specs = find_specs(names) if names else registry.aot_specs()
    served = [s.name for s in specs if s.host_part() is not None]
    if not served:
        raise ValueError("no module has a host part: `flashinfer build-host-parts`")
    nvcc, other = (_builds(compiler, served) for compiler in COMPILERS)
    rows, worse = [], []
    for name in served:
        found = compare(nvcc[name].kernels, other[name].kernels)
        worse += [f"{name}: {line}" for line in found.worse]
        rows.append(_row(name, nvcc[name], other[name], found))
    header = (
        *("module", "nvcc, CPU s", "NVRTC", "cold, s", "warm, ms"),
        *("equal", "registers", "instructions"),
    )
    click.echo(tabulate.tabulate(rows, header, tablefmt="github", disable_numparse=True))
    for line in worse:
        click.echo(line)
    if worse:
        raise click.exceptions.Exit(DIFFERENT)


COMMANDS = (compare_compilers,)
