"""`list-modules`, `module-status`, `build` and `export-compile-commands`."""

from __future__ import annotations

import datetime
import fnmatch
import json
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..compilation_context import parse_arch_list
from ..jit import JitSpec, build_jit_specs, current_compilation_context, registry, store
from ..jit.binary import read_kernels
from ..jit.cache import Entry, verify_all
from . import tables
from .failure import explained

NOT_BUILT = 3
DAMAGED = 4


def _set_targets(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        try:
            current_compilation_context.TARGET_CUDA_ARCHS = set(parse_arch_list(value))
        except ValueError as error:
            raise click.BadParameter(str(error)) from None


targets_option = click.option(
    "--arch",
    metavar="LIST",
    callback=_set_targets,
    expose_value=False,
    help='E.g. "8.0 9.0a". Default: FLASHINFER_CUDA_ARCH_LIST, else the GPUs of this machine.',
)


def find_specs(names: Sequence[str]) -> list[JitSpec]:
    """Modules that names stand for: a preset, a generator, a module or a pattern of modules.

    Raises
    ------
    ValueError
        If a name stands for nothing.
    """
    known = {spec.name: spec for spec in registry.aot_specs()}
    generators = registry.generators()
    found: dict[str, JitSpec] = {}
    for name in names:
        if name in registry.preset_names():
            specs = registry.preset_specs(name)
        elif name in generators:
            specs = list(generators[name].specs())
        else:
            specs = [known[module] for module in fnmatch.filter(known, name)]
        if not specs:
            raise ValueError(
                f"{name!r} is no preset ({', '.join(registry.preset_names())}), no generator "
                f"({', '.join(generators)}) and matches no module of `flashinfer module-status`"
            )
        found |= {spec.name: spec for spec in specs}
    return list(found.values())


@click.command("list-modules")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@explained
def list_modules(as_json: bool) -> None:
    """List the generators of modules, and the modules that each is built in ahead of time."""
    rows = []
    for generator in registry.generators().values():
        names = [spec.name for spec in generator.specs()]
        rows.append((generator.name, names, sorted(generator.presets)))
    if as_json:
        keys = ("generator", "modules", "presets")
        click.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
        return
    tables.show(
        ((name, len(modules), ", ".join(presets)) for name, modules, presets in rows),
        ["generator", "modules", "presets"],
    )


@click.command("module-status")
@click.option("--filter", "pattern", default="*", help="Name or pattern, e.g. 'norm_*bf16*'.")
@click.option("--detailed", is_flag=True, help="Also the kernels, and where each library lies.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--check", is_flag=True, help=f"Exit with {NOT_BUILT} unless all of them are built.")
@click.option(
    "--verify",
    is_flag=True,
    help="Only hash every module on disk, of all architectures, and check who can write it; "
    f"exit with {DAMAGED} if one is damaged.",
)
@targets_option
@explained
def module_status(pattern: str, detailed: bool, as_json: bool, check: bool, verify: bool) -> None:
    """Show which modules are built, for the current architectures and sources."""
    if verify:
        _verify(pattern, as_json)
        return
    if any(c in pattern for c in "*?["):
        specs = [s for s in registry.aot_specs() if fnmatch.fnmatch(s.name, pattern)]
    else:
        specs = [s for s in registry.aot_specs() if pattern in s.name]
    status = [_status(spec, detailed) for spec in specs]
    if as_json:
        click.echo(json.dumps(status, indent=2))
    else:
        _show_status(status, detailed)
    if check and not (status and all(row["built"] for row in status)):
        raise click.exceptions.Exit(NOT_BUILT)


def _verify(pattern: str, as_json: bool) -> None:
    """Check the modules on disk whose names fit, and say what is wrong with which."""
    pattern = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    checked = {
        folder: fault
        for folder, fault in verify_all().items()
        if fnmatch.fnmatch(folder.parent.name, pattern)
    }
    damaged = {str(folder): fault for folder, fault in checked.items() if fault}
    if as_json:
        click.echo(json.dumps({"verified": len(checked), "damaged": damaged}, indent=2))
    else:
        for folder, fault in damaged.items():
            click.echo(f"{folder}: {fault}")
        click.echo(f"{len(checked)} modules verified, {len(damaged)} damaged.")
        if damaged:
            click.echo("A damaged module is not loaded; the next build of it replaces it.")
    if damaged:
        raise click.exceptions.Exit(DAMAGED)


def _status(spec: JitSpec, detailed: bool) -> dict[str, Any]:
    entry = store.find(spec, verify=False)
    status: dict[str, Any] = {"name": spec.name, "built": entry is not None}
    if entry is not None:
        status |= _describe(entry)
        if detailed:
            status["library"] = str(entry.library)
            try:
                kernels = read_kernels(entry.library)
            except (OSError, ValueError, IndexError, struct.error) as error:
                status |= {"broken": f"{type(error).__name__}: {error}"}
                kernels = []
            status["kernels"] = [
                {"name": k.short_name, **{f: getattr(k, f) for f in KERNEL_FIELDS}} for k in kernels
            ]
    return status


KERNEL_FIELDS = ("arch", "registers", "stack_bytes", "shared_bytes")


def _describe(entry: Entry) -> dict[str, Any]:
    """What is known of an entry; `unknown` where its manifest does not say."""
    try:
        time_of_build = datetime.datetime.fromtimestamp(entry.manifest["created"])
        created = time_of_build.isoformat(" ", "minutes")
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        created = "unknown"
    archs = entry.manifest.get("archs")
    listed = archs if isinstance(archs, list) else []
    return {
        "archs": " ".join(f"sm_{arch}" for arch in listed) or "unknown",
        "bytes": entry.library.stat().st_size,
        "created": created,
    }


def _show_status(status: list[dict[str, Any]], detailed: bool) -> None:
    rows = [
        (s["name"], "built", s["archs"], tables.size(s["bytes"]), s["created"])
        if s["built"]
        else (s["name"], "not built", "-", "-", "-")
        for s in status
    ]
    tables.show(rows, ["module", "state", "architectures", "size", "created"])
    built = sum(s["built"] for s in status)
    click.echo(f"\n{built} of {len(status)} modules are built.")
    for s in status if detailed else ():
        if s["built"]:
            click.echo(f"\n{s['name']}\n{s['library']}")
            if "broken" in s:
                click.echo(f"cannot be read: {s['broken']}")
            headers = ["kernel", "arch", "registers", "stack bytes", "static shared bytes"]
            tables.show(
                ([k["name"], *(k[f] for f in KERNEL_FIELDS)] for k in s["kernels"]), headers
            )


@click.command("build")
@click.argument("names", nargs=-1, required=True)
@click.option("-v", "--verbose", is_flag=True, help="Show each compiler command.")
@targets_option
@explained
def build(names: tuple[str, ...], verbose: bool) -> None:
    """Build modules before their first use.

    NAMES are presets (llama-bf16), generators (gen_norm_module), modules or patterns ('norm_*').
    """
    specs = find_specs(names)
    missing = [spec for spec in specs if not spec.is_built()]
    there = len(specs) - len(missing)
    click.echo(f"{len(missing)} modules to build, {there} are there already.")
    start = time.monotonic()
    build_jit_specs(missing, verbose=verbose or None)
    if missing:
        click.echo(f"Built {len(missing)} modules in {time.monotonic() - start:.1f} s.")


@click.command("export-compile-commands")
@click.argument(
    "out", type=click.Path(dir_okay=False, path_type=Path), default="compile_commands.json"
)
@targets_option
@explained
def export_compile_commands(out: Path) -> None:
    """Write OUT (compile_commands.json) for clangd and other tools."""
    # One command per file: an editor needs one configuration of each, not all.
    commands: dict[str, Any] = {}
    for spec in registry.aot_specs():
        for command in spec.get_compile_commands():
            commands.setdefault(command["file"], command)
    out.write_text(json.dumps(list(commands.values()), indent=2) + "\n")
    click.echo(f"{out}: {len(commands)} files")


COMMANDS = (list_modules, module_status, build, export_compile_commands)
