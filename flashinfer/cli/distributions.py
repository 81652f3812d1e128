"""`build-host-parts`: what a wheel needs so that its modules compile without a toolkit."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Sequence
from pathlib import Path

import click

from ..jit import host_parts_build, registry
from ..jit.spec import ModuleSpec
from .failure import explained
from .modules import find_specs, targets_option


@click.command("build-host-parts")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("names", nargs=-1)
@click.option(
    "--long-kernels",
    is_flag=True,
    help="Compile the kernels, too, for which NVRTC takes longest.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show each compiler command.")
@targets_option
@explained
def build_host_parts(
    folder: Path, names: tuple[str, ...], long_kernels: bool, verbose: bool
) -> None:
    """Compile launchers and bindings into FOLDER, for machines that have NVRTC alone.

    NAMES are as for `build`, or patterns of more configurations; by default everything. The targets
    decide which modules there are, not what a host part can run on.
    """
    specs = _chosen(names) if names else registry.host_specs()
    start = time.monotonic()
    left_out = host_parts_build.build(specs, folder, verbose, long_kernels)
    for name, reason in left_out.items():
        click.echo(f"{name}: {reason}")
    size = sum(path.stat().st_size for path in folder.glob("*.xz"))
    click.echo(
        f"{len(specs) - len(left_out)} host parts in {folder}, {size >> 10} KiB, "
        f"in {time.monotonic() - start:.0f} s."
    )


def _chosen(names: Sequence[str]) -> list[ModuleSpec]:
    """The modules that patterns of host parts, presets and generators stand for."""
    known = {spec.name: spec for spec in registry.host_specs()}
    found: dict[str, ModuleSpec] = {}
    for name in names:
        matches = [known[module] for module in fnmatch.filter(known, name)]
        found |= {spec.name: spec for spec in matches or find_specs([name])}
    return list(found.values())


COMMANDS = (build_host_parts,)
