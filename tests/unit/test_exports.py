"""Exports of native modules take few arguments, leave none over, and are as their comments say.

Only the bindings are compiled. Their launchers stay undefined symbols, which nothing calls: every
call here is refused before that.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi

from flashinfer.jit import JitSpec, registry

pytestmark = pytest.mark.compiler

CSRC = Path(__file__).resolve().parents[2] / "csrc"
MAX_ARGUMENTS = 12
# Fields of configurations that no export depends on, besides dtypes.
SAME = {"ACTIVATION", "CODE", "GROUP_SIZE", "INTERLEAVE", "LAYOUT", "NORM", "SCALE"}
SAME |= {"TILE_ROWS", "TILE_COLUMNS", "CLUSTER_ROWS", "CLUSTER_COLUMNS", "CONSUMERS", "SPLITS"}
SAME |= {"INDEX", "SWAP", "TOKENS", "WARPS", "WORLD_SIZE"}
UNKNOWN = "?"  # refused wherever it is taken
# Their first argument is native state, which a test cannot make up.
STATEFUL = {
    "attention_device_plan_jit_binding.cc",
    "attention_jit_binding.cc",
    "attention_plan_jit_binding.cc",
    "mla_plan_jit_binding.cc",
}
# Includes a header that CuTe-DSL writes, so that it compiles only where that is installed.
NEEDS_CUTE_DSL = {"cute_dsl_moe_activation_jit_binding.cc"}
EXPORT = re.compile(r"^FLASHINFER_FFI_EXPORT(?:_INT)?\((\w+),", flags=re.M)
# What a message asks for: a value that is taken for it.
VALUES: dict[str, Any] = {
    "a torch.Tensor": torch.zeros(1),
    "a number": 2.0,
    "an int": 2,
    "a bool": False,
    "a bool or None": None,
    "a tuple": (),
}


def package_specs() -> list[JitSpec]:
    """Ahead-of-time modules, without those of example packages that another test has imported."""
    generators = registry.generators().values()
    own = (g for g in generators if g.function.__module__.startswith("flashinfer."))
    return list({spec.name: spec for generator in own for spec in generator.specs()}.values())


def binding_of(spec: JitSpec) -> dict[str, str]:
    (command,) = (c for c in spec.get_compile_commands() if c["file"].endswith("_jit_binding.cc"))
    return command


def cases(full: bool) -> list[JitSpec]:
    """Ahead-of-time modules; without `full` as many as have every value of every field that may
    make a difference to the exports of a binding."""
    chosen: list[JitSpec] = []
    seen: set[tuple[str, ...]] = set()
    for spec in package_specs():
        command = binding_of(spec)
        if Path(command["file"]).name in STATEFUL:
            continue
        flags = dict(re.findall(r"-DFLASHINFER_CFG_(\w+)=(\S+)", command["command"]))
        flags = {n: v for n, v in flags.items() if n not in SAME and "DTYPE" not in n}
        values = {(command["file"], *flag) for flag in flags.items()} | {(command["file"],)}
        if full or not values <= seen:
            seen |= values
            chosen.append(spec)
    return chosen


def compiled(spec: JitSpec, folder: Path) -> Path:
    """The binding as a library of its own."""
    command = shlex.split(binding_of(spec)["command"])
    output = command.index("-o") + 1
    library = folder / f"{spec.name}.so"
    command[output] = str(library.with_suffix(".o"))
    unoptimised = ["-O0" if argument == "-O2" else argument for argument in command]
    subprocess.run(unoptimised, check=True, cwd=folder)
    link = [command[0], "-shared", command[output], "-o", str(library), "-Wl,-z,lazy"]
    subprocess.run(link, check=True)
    return library


def exports(library: Any, source: Path) -> Iterator[tuple[str, Any]]:
    for name in EXPORT.findall(source.read_text()):
        function = getattr(library, name, None)
        if function is not None:  # else this configuration has no such export
            yield name, function


def put(values: Any, value: Any) -> tuple[Any, bool]:
    """`values` with the first unknown one replaced, in tuples too; whether there was one."""
    for i, old in enumerate(values):
        if old is UNKNOWN:
            return (*values[:i], value, *values[i + 1 :]), True
        if isinstance(old, tuple):
            new, found = put(old, value)
            if found:
                return (*values[:i], new, *values[i + 1 :]), True
    return values, False


def enough_arguments(function: Any) -> tuple[Any, ...]:
    """Calls with ever more arguments, of the types that it asks for, until it asks for no more."""
    arguments: tuple[Any, ...] = ()
    for _ in range(200):
        try:
            function(*arguments)
        except Exception as error:
            message = str(error)
        else:
            return arguments
        if message.startswith("missing argument"):
            arguments = (*arguments, UNKNOWN)
        elif wanted := re.search(r" must be (.+), got a str$", message):
            arguments, found = put(arguments, VALUES[wanted[1]])
            assert found, message
        elif size := re.search(r" must have (\d+) elements, got 0$", message):
            arguments = fill_group(arguments, int(size[1]))
        else:
            return arguments
    raise AssertionError(f"no end of arguments: {message}")


def fill_group(arguments: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """The tuple that was just put in gets `size` unknown elements."""
    last = max(i for i, value in enumerate(arguments) if value == ())
    return (*arguments[:last], (UNKNOWN,) * size, *arguments[last + 1 :])


def documented(source: Path) -> dict[str, list[tuple[int, int]]]:
    """(fewest, most) arguments of each form of an export, by the comment at a binding's head."""
    head = source.read_text().partition("#include")[0]
    found: dict[str, list[tuple[int, int]]] = {}
    for name, arguments in re.findall(r"^//   (\w+)\(([^()]*)\)", head, flags=re.M):
        arguments = arguments.replace("//", "")
        most = len(re.findall(r"\w+", arguments))
        optional = " ".join(re.findall(r"\[([^\]]*)\]", arguments))
        found.setdefault(name, []).append((most - len(re.findall(r"\w+", optional)), most))
    return found


def test_every_export_takes_few_arguments_and_none_that_is_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    specs = cases(full)
    seen = set()
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(lambda spec: compiled(spec, tmp_path), specs))
    for spec, library in zip(specs, libraries, strict=True):
        source = Path(binding_of(spec)["file"])
        forms = documented(source)
        for name, function in exports(tvm_ffi.load_module(library), source):
            seen.add((source.name, name))
            arguments = enough_arguments(function)
            count = len(arguments)
            assert count <= MAX_ARGUMENTS, f"{spec.name}: {name} takes {count} arguments"
            assert any(low <= count <= high for low, high in forms.get(name, ())), (
                f"{source.name}: {name} takes {count} arguments, its comment says {forms.get(name)}"
            )
            with pytest.raises(TypeError, match=f"takes {count} arguments, got {count + 2}"):
                function(*arguments, "surplus", 42)
    everything = {
        (source.name, name)
        for source in CSRC.glob("*_jit_binding.cc")
        if source.name not in STATEFUL | NEEDS_CUTE_DSL
        for name in EXPORT.findall(source.read_text())
    }
    assert seen == everything


@pytest.mark.parametrize("binding", sorted(STATEFUL | NEEDS_CUTE_DSL))
def test_exports_with_native_state_are_documented_with_few_arguments(binding: str):
    """What these take is counted in the comment; a variant's own arguments come on top."""
    source = CSRC / binding
    forms = documented(source)
    assert set(forms) == set(EXPORT.findall(source.read_text()))
    most = {name: max(high for _, high in counts) for name, counts in forms.items()}
    assert max(most.values()) <= MAX_ARGUMENTS, most
