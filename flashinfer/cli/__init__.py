"""The command line. One file per group of commands; what they print goes through `tables`.

Exit codes: 0 done, 1 failed, 2 wrong usage (click's own), 3 the answer is "no" (`module-status`
with a filter when a module is not built, `replay --compare` when results differ, `compare-sass`
when machine code does).
"""

from __future__ import annotations

import click

from .. import version as package
from . import cache, environment, modules, new_op, replay, sass


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package.__version__, "--version", message="flashinfer %(version)s")
def main() -> None:
    """FlashInfer: look at this installation, build kernels before use, replay recorded calls."""


@main.command()
def version() -> None:
    """Print version and commit."""
    click.echo(f"{package.__version__} ({package.__git_version__})")


for _group in (environment, modules, cache, replay, sass, new_op):
    for _command in _group.COMMANDS:
        main.add_command(_command)
