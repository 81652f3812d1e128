"""`show-config` and `collect-env`."""

from __future__ import annotations

import json

import click

from .. import env
from ..collect_env import collect_env
from . import tables


@click.command("show-config")
def show_config() -> None:
    """Show what decides how modules are found and built, and every variable with its value."""
    report = collect_env()
    for title in ("flashinfer", "toolchain", "cache"):
        tables.show_section(title, report[title])
    set_now = report["variables"]
    rows = [
        (v.name, set_now.get(v.name, v.shown_default), "set" if v.name in set_now else "default")
        for v in env.VARIABLES.values()
        if v.name.startswith("FLASHINFER_") or v.name == "MAX_JOBS"
    ]
    tables.show(rows, ["variable", "value", "from"])


@click.command("collect-env")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def collect_env_command(as_json: bool) -> None:
    """Collect versions, GPUs, toolchain, cache and variables, as a bug report needs them."""
    report = collect_env()
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for title, values in report.items():
        tables.show_section(title, values)


COMMANDS = (show_config, collect_env_command)
