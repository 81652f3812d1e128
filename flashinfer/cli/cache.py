"""`clear-cache`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from ..jit import cache, places
from ..jit.publish import clear_cache_dir
from . import tables
from .failure import explained


@click.command("clear-cache")
@click.option("-y", "--yes", is_flag=True, help="Do not ask. Without a terminal nobody is asked.")
@explained
def clear_cache(yes: bool) -> None:
    """Remove the compiled modules of this version. Running processes keep what they have loaded."""
    folder = places.version_dir()
    if not folder.is_dir():
        click.echo(f"{folder} does not exist: nothing to remove.")
        return
    count, size = _usage(folder)
    question = f"Remove {folder} ({count} modules, {tables.size(size)})?"
    if not yes and is_asked():
        click.confirm(question, abort=True)
    clear_cache_dir()
    click.echo(f"Removed {folder} ({count} modules, {tables.size(size)}).")


def is_asked() -> bool:
    """Whether somebody is there to answer a question."""
    return sys.stdin.isatty()


def _usage(folder: Path) -> tuple[int, int]:
    """(compiled modules, bytes) under a folder."""
    count = size = 0
    for parent, _, names in os.walk(folder):
        count += cache.MANIFEST in names
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # another process is building or clearing
                continue
    return count, size


COMMANDS = (clear_cache,)
