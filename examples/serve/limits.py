"""How much a client may ask of the server: each limit is a flag of `serve`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click


def _limit(default: float, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Limits:
    """Limits of requests and connections; `help` of each field says what it is for.

    Raises
    ------
    ValueError
        If a limit is not above 0.
    """

    max_body_bytes: int = _limit(2 << 20, "Largest body of a request; a larger one gets a 413.")
    max_header_bytes: int = _limit(16 << 10, "Largest head of a request.")
    max_stops: int = _limit(4, "Stop texts of a request.")
    max_stop_length: int = _limit(1000, "Characters of a stop text.")
    max_choices: int = _limit(128, "Answers that one request may ask for.")
    max_connections: int = _limit(
        1024, "Open connections; one more takes the oldest idle one's place."
    )
    request_timeout: float = _limit(30.0, "Seconds in which a client must send a request.")
    read_timeout: float = _limit(30.0, "Seconds in which a client must take what is sent to it.")
    keep_alive_timeout: float = _limit(5.0, "Seconds between two requests of a connection.")
    shutdown_timeout: float = _limit(10.0, "Seconds in which the server ends after SIGTERM.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"`{field.name}` must be above 0, got {getattr(self, field.name)}")


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a flag for each field of `Limits`."""
    for field in reversed(dataclasses.fields(Limits)):
        whole = isinstance(field.default, int)
        command = click.option(
            "--" + field.name.replace("_", "-"),
            type=click.IntRange(1) if whole else click.FloatRange(0, min_open=True),
            default=field.default,
            show_default=True,
            help=field.metadata["help"],
        )(command)
    return command
