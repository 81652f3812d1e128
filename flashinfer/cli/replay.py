"""`replay`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click
import torch

from .._instrument.replay import replay_from_dump, replay_sequence
from . import tables
from .failure import explained

DIFFERENT = 3


@click.command("replay")
@click.argument("dump_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--compare", is_flag=True, help=f"Exit with {DIFFERENT} if results differ.")
@click.option("--device", help="Where to run the calls.  [default: cuda, without a GPU cpu]")
@click.option(
    "--import",
    "modules",
    metavar="MODULE",
    multiple=True,
    help="A module of yours whose @flashinfer_api functions were recorded.",
)
@explained
def replay(dump_dir: Path, compare: bool, device: str | None, modules: tuple[str, ...]) -> None:
    """Run recorded calls again: those under DUMP_DIR, or the one whose folder it is.

    Calls are recorded with FLASHINFER_LOGLEVEL=10 in FLASHINFER_DUMP_DIR. A dump can call the
    operations of this package, and those of modules that you --import.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise click.BadParameter(f"cannot import {module}: {error}") from None
    if (dump_dir / "metadata.json").is_file():
        replays = [replay_from_dump(str(dump_dir), compare, device, run=True)]
    else:
        replays = replay_sequence(str(dump_dir), device)
    states = [_state(result, compare) for result in replays]
    rows = zip((r["api"] for r in replays), (r["dump_dir"] for r in replays), states, strict=True)
    tables.show(((api, Path(folder).name, state) for api, folder, state in rows), HEADERS)
    for result, state in zip(replays, states, strict=True):
        lines = result.get("differences", ()) if compare else ()
        if state == "failed":
            lines = [f"{type(result['error']).__name__}: {result['error']}"]
        if lines:
            click.echo(f"\n{result['dump_dir']}")
            click.echo("\n".join(f"  {line}" for line in lines))
    if "failed" in states:
        raise click.exceptions.Exit(1)
    if "differs" in states:
        raise click.exceptions.Exit(DIFFERENT)


HEADERS = ("api", "call", "result")


def _state(result: dict[str, Any], compare: bool) -> str:
    """`ran`, `failed`; when compared `same` or `differs`: a call that raised may do so again."""
    if compare and "execution_result" in result:
        return "same" if result["comparison_match"] else "differs"
    return "failed" if result["error"] is not None else "ran"


COMMANDS = (replay,)
