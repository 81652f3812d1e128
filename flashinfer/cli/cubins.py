"""`build-cubins`, `list-cubins`, `download-cubin`, `clear-cubin`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from .. import artifacts, env
from ..jit import cubins_build, places, registry
from . import tables
from .cache import is_asked
from .failure import explained
from .modules import find_specs, targets_option


@click.command("build-cubins")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("names", nargs=-1)
@click.option("-v", "--verbose", is_flag=True, help="Show each compiler command.")
@targets_option
@explained
def build_cubins(folder: Path, names: tuple[str, ...], verbose: bool) -> None:
    """Compile kernels with NVRTC into FOLDER, for machines that have no compiler at all.

    NAMES are as for `build`; by default every ahead-of-time module. Each needs its host part
    (`build-host-parts`). FOLDER can be FLASHINFER_CUBIN_DIR, or a repository of others.
    """
    specs = find_specs(names) if names else registry.aot_specs()
    start = time.monotonic()
    sha256, left_out = cubins_build.build(specs, folder, verbose or None)
    for name, reason in left_out.items():
        click.echo(f"{name}: {reason}")
    files = list((folder / artifacts.ArtifactPath.MODULES).glob("*/*.cubin"))
    size = sum(path.stat().st_size for path in files)
    seconds = time.monotonic() - start
    click.echo(f"{len(files)} cubins in {folder}, {size >> 10} KiB, in {seconds:.0f} s.")
    click.echo(f"SHA-256 of the manifest: {sha256}")


@click.command("list-cubins")
@explained
def list_cubins() -> None:
    """List the cubins on disk, and what is wrong with those that are refused.

    Exit code 3 if one is.
    """
    found = artifacts.cubin_problems()
    if not found:
        folders = " and ".join(map(str, places.cubin_roots()))
        click.echo(f"There are no cubins in {folders}.")
        return
    rows = []
    for path, problem in sorted(found.items()):
        _, _, arch = path.stem.partition("-")
        rows.append((path.parent.name, f"sm_{arch}", problem or "whole"))
    tables.show(rows, ["module", "target", "state"])
    refused = sum(problem is not None for problem in found.values())
    click.echo(f"{len(found)} cubins, {refused} refused.")
    if refused:
        raise click.exceptions.Exit(3)


@click.command("download-cubin")
@explained
def download_cubin() -> None:
    """Download the cubins of this version from FLASHINFER_CUBINS_REPOSITORY.

    Without that setting nothing is downloaded, which is no failure: kernels are compiled.
    """
    if not env.FLASHINFER_CUBINS_REPOSITORY.is_set():
        click.echo(
            "FLASHINFER_CUBINS_REPOSITORY is not set: nothing is downloaded. Every kernel is "
            "compiled from its source, at its first call or before by `flashinfer build`."
        )
        return
    artifacts.download_artifacts()
    click.echo(f"{len(artifacts.get_artifacts_status())} cubins are in {places.cubin_dir()}.")


@click.command("clear-cubin")
@click.option("-y", "--yes", is_flag=True, help="Do not ask. Without a terminal nobody is asked.")
@explained
def clear_cubin(yes: bool) -> None:
    """Remove the downloaded cubins; those of the package flashinfer-cubin stay."""
    folder = places.cubin_dir()
    if not folder.is_dir():
        click.echo(f"{folder} does not exist: nothing to remove.")
        return
    if not yes and is_asked():
        click.confirm(f"Remove the cubins in {folder}?", abort=True)
    artifacts.clear_cubin()
    click.echo(f"Removed the cubins in {folder}.")


COMMANDS = (build_cubins, list_cubins, download_cubin, clear_cubin)
