"""`show-config` and `collect-env`."""

from __future__ import annotations

import json

import click

from .. import env
from ..collect_env import collect_env
from . import tables
from .failure import explained


@click.command("show-config")
@explained
def show_config() -> None:
    """Show what decides how modules are found and built, and every variable with its value."""
    report = collect_env()
    for title in ("flashinfer", "toolchain", "cache"):
        tables.show_section(title, report[title])
    set_now = report["variables"]
    rows = [
        (v.name, set_now.get(v.name, v.shown_default), _origin(v))
        for v in env.VARIABLES.values()
        if v.name.startswith("FLASHINFER_") or v.name == "MAX_JOBS"
    ]
    tables.show(rows, ["variable", "value", "from"])


def _origin(variable: env.Variable) -> str:
    """Where a variable's value is from."""
    if not variable.is_set():
        return "default"
    try:
        variable.get()
    except (ValueError, RuntimeError):
        return f"set, but no {variable.type}"
    return "set"


@click.command("collect-env")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@explained
def collect_env_command(as_json: bool) -> None:
    """Collect versions, GPUs, toolchain, cache and variables, as a bug report needs them."""
    report = collect_env()
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for title, values in report.items():
        tables.show_section(title, values)


COMMANDS = (show_config, collect_env_command)
