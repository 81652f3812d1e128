"""Says in one line, without a traceback, what a user of the command line did wrong."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from . import kernels


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Wrong arguments, and what the machine lacks, end the command with a message."""
    try:
        with lacking():
            yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@contextlib.contextmanager
def lacking() -> Iterator[None]:
    """Memory, a compiler or an operation that is not there ends the command with a message."""
    try:
        yield
    except kernels.MissingOperation as error:
        raise click.ClickException(str(error)) from error
    except RuntimeError as error:
        if kernels.is_failure(error):
            raise click.ClickException(str(error)) from error
        message = str(error).splitlines()[0]
        # On the CPU it is a RuntimeError as any other.
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in message:
            raise
        raise click.ClickException(
            f"out of memory for the model or the KV cache (--num-pages): {message}"
        ) from error


def check_writable(option: str, path: Path | None) -> None:
    """Before work whose result goes there; ValueError if it cannot."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"`{option}` must be a file in a folder that exists, got {str(path)!r}")


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address, which refuses connections until a server listens on it.

    Raises
    ------
    ValueError
        If the address is taken, or is none.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        result = socket.socket(family, kind, protocol)
        try:
            # A port is free again as soon as its server has ended.
            result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            result.bind(address)
        except OSError:
            result.close()
            raise
    except OSError as error:
        raise ValueError(
            f"cannot serve on `--host` {host} `--port` {port}: {error.strerror}"
        ) from (error)
    return result
