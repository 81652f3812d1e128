"""`install-cubin-wheel`, `install-jit-cache-wheel`, `download-kernels`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

import click

from .. import env
from ..version import __version__
from .failure import explained

_CUBIN, _JIT_CACHE = "flashinfer-cubin", "flashinfer-jit-cache"


def _command(name: str, wheels: Sequence[str], text: str) -> click.Command:
    """A command that installs wheels of this version, and nothing else."""

    @click.command(name, help=text)
    @click.option("--from", "place", help="Folder of wheels, or address of a page of links.")
    @click.option("--dry-run", is_flag=True, help="Print pip's command line alone.")
    @explained
    def command(place: str | None, dry_run: bool) -> None:
        place = place or env.FLASHINFER_WHEELS_REPOSITORY.get()
        if not place:
            raise click.UsageError(
                f"from where? Give --from or set {env.FLASHINFER_WHEELS_REPOSITORY.name}; nothing "
                "is downloaded from elsewhere"
            )
        words = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
        words += ["--find-links", place, *(f"{wheel}=={__version__}" for wheel in wheels)]
        click.echo(shlex.join(words))
        if dry_run:
            return
        if env.FLASHINFER_NO_DOWNLOAD.get():
            raise click.ClickException("FLASHINFER_NO_DOWNLOAD is set: nothing is installed")
        if subprocess.run(words).returncode != 0:
            raise click.ClickException(f"pip did not install {' and '.join(wheels)} from {place}")

    return command


COMMANDS = (
    _command(
        "install-cubin-wheel",
        [_CUBIN],
        "Install flashinfer-cubin of this version: kernels that NVRTC compiled.",
    ),
    _command(
        "install-jit-cache-wheel",
        [_JIT_CACHE],
        "Install flashinfer-jit-cache of this version: whole compiled modules.",
    ),
    _command(
        "download-kernels",
        [_CUBIN, _JIT_CACHE],
        "Install flashinfer-cubin and flashinfer-jit-cache of this version.",
    ),
)
