"""Errors that a user can act on end in one message and exit code 1, not in a traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")

PASSED_ON = (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError)


def explained(command: Callable[P, R]) -> Callable[P, R]:
    """Turn the package's own exceptions (all derive from these three) into a click error.

    A reader that has gone (``| head``) is no error: click ends the program without a word.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (RuntimeError, ValueError, OSError) as error:
            if isinstance(error, PASSED_ON):
                raise
            raise click.ClickException(str(error)) from error

    return run
