"""Pages of the API reference: one for each public module, every public name once.

A name has its entry where a program finds it first: at `flashinfer` if it is exported there, else
in its module. Pages of other modules that export it link there.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.ext.napoleon import Config, NumpyDocstring

import flashinfer

# The command line has `--help`, the reference backend's stand-ins and the log no names to call.
LEFT_OUT = {"__main__", "cli", "compat", "env", "version"}
# Modules of packages from which engines import names, or guides tell users to.
DEEPER = (
    "autotuner.listeners",
    "comm.comm_backend",
    "comm.mnnvl",
    "comm.trtllm_alltoall",
    "fused_moe.adapters",
    "gdn_kernels.gdn_decode_bf16_state",
    "jit.attention",
)


NUMPY = Config(
    napoleon_use_param=False,
    napoleon_use_rtype=False,
    napoleon_custom_sections=[("Attributes", "params_style")],
)


@dataclass(frozen=True)
class Entry:
    """One public function, class or enumeration."""

    name: str  # as a program writes it, from `flashinfer.` on
    value: Any

    def text(self) -> str:
        if not inspect.isclass(self.value):
            return described("function", self.name + signature(self.value), self.value)
        if issubclass(self.value, enum.Enum):
            values = [
                f"\n.. py:attribute:: {n}\n   :value: {v.value!r}\n" for n, v in members(self)
            ]
            return described("class", self.name, self.value, "".join(values))
        methods = [
            described("property", name, method)
            if isinstance(method, property)
            else described("method", name + signature(method), method)
            for name, method in members(self)
        ]
        return described("class", self.name + signature(self.value), self.value, "".join(methods))


def described(kind: str, head: str, value: Any, body: str = "") -> str:
    """A directive of Sphinx's Python domain with the docstring, which is numpy's, as its text."""
    # A backslash continues a line at the margin, which a raw docstring keeps.
    written = inspect.cleandoc(re.sub(r"(?<!\\)\\\n", "", value.__doc__ or ""))
    doc = re.sub(r"(?<=\*|\)) -- ", " – ", str(NumpyDocstring(written, NUMPY)))
    doc = re.sub(r"(?<!`)\bdocs/([\w/]+)\.md", r":doc:`docs/\1.md </\1>`", doc)
    return f"\n.. py:{kind}:: {head}\n\n" + textwrap.indent(f"{doc}\n{body}", "   ")


def signature(value: Any) -> str:
    """Parameters with their defaults; the docstring has types, shapes and units."""
    try:
        found = inspect.signature(value)
    except ValueError:  # a class without one of its own
        return "()"
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    if parameters and parameters[0].name == "self":
        del parameters[0]
    shown = [
        p if p.default is p.empty else p.replace(default=_Shown(p.default)) for p in parameters
    ]
    return str(inspect.Signature(shown))


class _Shown:
    """A default, as a program writes it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if isinstance(self.value, enum.Enum):
            return str(self.value)
        name = getattr(self.value, "__qualname__", None)
        return name or re.sub(r"<.*>", "...", repr(self.value))


def is_ours(value: Any) -> bool:
    return _home(value).startswith("flashinfer") and (
        inspect.isclass(value) or inspect.isroutine(value)
    )


def members(entry: Entry) -> list[tuple[str, Any]]:
    """Values of an enumeration, else public methods and properties, inherited ones too."""
    cls = entry.value
    if issubclass(cls, enum.Enum):
        return list(cls.__members__.items())
    static = [(n, inspect.getattr_static(cls, n)) for n in dir(cls) if not n.startswith("_")]
    return [
        (name, member if isinstance(member, property) else getattr(cls, name))
        for name, member in static
        if is_ours(getattr(member, "__func__", None) or getattr(member, "fget", None) or member)
    ]


def public_names(module: ModuleType) -> list[str]:
    """`__all__`, or else what the module defines, or imports as itself (``import f as f``)."""
    names = getattr(module, "__all__", None)
    if names is None:
        prefix, again = f"{module.__name__}.", imported_as_themselves(module)
        names = [
            name
            for name in dir(module)
            if not name.startswith("_")
            and (f"{_home(getattr(module, name))}.".startswith(prefix) or name in again)
        ]
    return [name for name in names if is_ours(getattr(module, name))]


def _home(value: Any) -> str:
    return str(getattr(value, "__module__", ""))


def imported_as_themselves(module: ModuleType) -> set[str]:
    """Names that a module passes on."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
    return {alias.name for node in imports for alias in node.names if alias.asname == alias.name}


@cache
def modules() -> tuple[ModuleType, ...]:
    """Public modules directly under `flashinfer`, and the package itself."""
    names = [info.name for info in pkgutil.iter_modules(flashinfer.__path__)]
    public = [n for n in names if not n.startswith("_") and n not in LEFT_OUT]
    return tuple(importlib.import_module(f"flashinfer.{name}") for name in (*public, *DEEPER))


@cache
def top_level() -> dict[int, str]:
    """Names at `flashinfer`, by the identity of what they name."""
    return {id(getattr(flashinfer, n)): n for n in dir(flashinfer) if not n.startswith("_")}


@cache
def names() -> dict[int, list[str]]:
    """All names of everything public, by identity: the one of its entry comes first."""
    found: dict[int, list[str]] = {}
    for module in modules():
        for name in public_names(module):
            found.setdefault(id(getattr(module, name)), []).append(f"{module.__name__}.{name}")
    for value, full in found.items():
        home = _home(find(full[0]))
        full.sort(key=lambda name: not f"{home}.".startswith(name.rpartition(".")[0] + "."))
        if value in top_level():
            full.insert(0, f"flashinfer.{top_level()[value]}")
    return found


@cache
def entries() -> dict[str, tuple[list[Entry], list[str]]]:
    """For each module: the entries of its page, and the names of those that are on another."""
    pages: dict[str, tuple[list[Entry], list[str]]] = {m.__name__: ([], []) for m in modules()}
    for first, *others in names().values():
        homes = [name.rpartition(".")[0] for name in (first, *others)]
        home = next(home for home in homes if home != "flashinfer")
        pages[home][0].append(Entry(first, find(first)))
        for other in {*homes} - {home, "flashinfer"}:
            pages[other][1].append(first)
    return {name: page for name, page in pages.items() if any(page)}


def write(folder: Path) -> None:
    """Write `api.rst` and `api/<module>.rst`."""
    (folder / "api").mkdir(parents=True)
    listed = []
    for module, (here, elsewhere) in entries().items():
        name = module.removeprefix("flashinfer.")
        text = f"{module}\n{'=' * len(module)}\n\n"
        if module not in (entry.name for entry in here):  # a function hides a module of its name
            text += f".. py:module:: {module}\n\n"
        text += inspect.getdoc(importlib.import_module(module)) or ""
        text += "\n\n.. py:currentmodule:: None\n\n"
        text += "\n".join(entry.text() for entry in here)
        if elsewhere:
            names = ", ".join(f":py:obj:`{other}`" for other in elsewhere)
            text += f"\n.. rubric:: Also in this module\n\n{names}\n"
        (folder / "api" / f"{name}.rst").write_text(text)
        listed.append(name)
    (folder / "api" / "index.rst").write_text(_index(listed))


def _index(names: list[str]) -> str:
    return (
        "API reference\n=============\n\n"
        "Every public name, from its docstring. A name that is exported at ``flashinfer`` stands\n"
        "under that name on the page of its module.\n\n"
        ".. list-table::\n   :widths: 25 75\n\n"
        + "".join(f"   * - :doc:`{name}`\n     - {_summary(name)}\n" for name in names)
        + "\n.. toctree::\n   :hidden:\n\n"
        + "".join(f"   {name}\n" for name in names)
    )


def _summary(name: str) -> str:
    doc = inspect.getdoc(importlib.import_module(f"flashinfer.{name}")) or ""
    return " ".join(doc.partition("\n\n")[0].split())


def find(name: str) -> Any:
    """The value of a dotted name that begins with `flashinfer.`, or None."""
    module, parts = "flashinfer", name.split(".")[1:]
    while parts and f"{module}.{parts[0]}" in sys.modules:
        module = f"{module}.{parts.pop(0)}"
    value: Any = sys.modules[module]
    if not parts and "." in module:  # a function may hide a module of its name
        parent, _, last = module.rpartition(".")
        value = getattr(sys.modules[parent], last, value)
    for part in parts:
        value = getattr(value, part, None)
    return value
