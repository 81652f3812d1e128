"""`build-host-parts`: what a wheel needs so that its modules compile without a toolkit."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ..jit import host_parts_build, registry
from .failure import explained
from .modules import find_specs, targets_option


@click.command("build-host-parts")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("names", nargs=-1)
@click.option("-v", "--verbose", is_flag=True, help="Show each compiler command.")
@click.option("--unproven", is_flag=True, help="Families too that have not run so on a GPU.")
@targets_option
@explained
def build_host_parts(folder: Path, names: tuple[str, ...], verbose: bool, unproven: bool) -> None:
    """Compile launchers and bindings into FOLDER, for machines that have NVRTC alone.

    NAMES are as for `build`; by default every ahead-of-time module. The targets decide which
    modules there are, not what a host part can run on.
    """
    specs = find_specs(names) if names else registry.aot_specs()
    start = time.monotonic()
    left_out = host_parts_build.build(specs, folder, verbose, unproven)
    for name, reason in left_out.items():
        click.echo(f"{name}: {reason}")
    size = sum(path.stat().st_size for path in folder.glob("*.so.xz"))
    click.echo(
        f"{len(specs) - len(left_out)} host parts in {folder}, {size >> 10} KiB, "
        f"in {time.monotonic() - start:.0f} s."
    )


COMMANDS = (build_host_parts,)
