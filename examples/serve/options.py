"""Flags of the command line for what an engine can do in more than one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from . import kernels


def _use(_context: click.Context, _option: click.Parameter, name: str | None) -> None:
    if name is not None:
        try:
            kernels.use(name)
        except ValueError as error:
            raise click.UsageError(str(error)) from error


kernels_option = click.option(
    "--kernels",
    metavar="MODULE",
    is_eager=True,  # before anything asks for an operation
    expose_value=False,
    callback=_use,
    help="The package that computes: a module, or the folder of another flashinfer.",
)
"""Flag of a command for `kernels.use`."""

_OPTIONS = (
    click.option("--max-batch-tokens", default=2048, help="New tokens per step."),
    click.option(
        "--chunked-prefill/--no-chunked-prefill",
        default=True,
        help="Divide prompts among steps. Without it a step must have room for the longest text.",
    ),
    click.option(
        "--prefix-caching/--no-prefix-caching",
        default=True,
        help="Share the pages of equal beginnings, also with requests that have ended.",
    ),
    click.option(
        "--speculation",
        default=0,
        help="Tokens to guess per request and step, from what the text has repeated; 0: none.",
    ),
    click.option("--ngram", default=3, help="Tokens that must repeat for a guess."),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these flags; their values are arguments of `Engine`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
