"""Plain-text tables for people; scripts use `--json` and exit codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from tabulate import tabulate


def show(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> None:
    """Print rows under a line of headers."""
    # disable_numparse: a version such as 0.10 is not the number 0.1.
    click.echo(tabulate(list(rows), headers=headers, tablefmt="simple", disable_numparse=True))


def show_section(title: str, values: Mapping[str, Any]) -> None:
    """Print a titled list of names and values; lists and mappings take a line per element."""
    click.secho(title, bold=True)
    rows = [(f"  {name}", text(value)) for name, value in values.items()]
    click.echo(tabulate(rows, tablefmt="plain", disable_numparse=True) if rows else "  none")
    click.echo()


def text(value: Any) -> str:
    """A value as a person writes it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "\n".join(f"{k}: {text(v)}" for k, v in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return "\n".join(text(v) for v in value) or "-"
    return str(value)


def size(num_bytes: int) -> str:
    """A file size, e.g. `1.2 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
