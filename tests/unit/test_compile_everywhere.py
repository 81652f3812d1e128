"""Modules compile for every architecture of the README, without a warning or a spill.

`--full` compiles every module for all architectures. The default is a fixed sample:

- One module per generator, usually the one with every option on, is compiled for sm_90a, the
  first target, and every other one for one more, dealt in turn: each architecture has several
  modules.
- The other modules that differ in more than which 16-bit type they take, and one float16 per
  generator, are candidates for the oldest architecture and sm_90a. A sixteenth of them is
  compiled, chosen by a hash of the name, no two of one generator.
"""

from __future__ import annotations

import dataclasses
import zlib

import pytest
import torch
from strict_build import build_and_measure, most_memory, spills
from strict_build import strict_build as strict_build

from flashinfer.cli.support import ARCHITECTURES
from flashinfer.jit import JitSpec, build_jit_specs, registry
from flashinfer.jit.binary import read_kernels

# Examples and tests register generators too; this is about the package's own.
GENERATORS = [
    generator
    for generator in registry.generators().values()
    if generator.function.__module__.startswith("flashinfer.")
]
SPECS = {spec.name: spec for generator in GENERATORS for spec in generator.specs()}


def representatives() -> dict[str, JitSpec]:
    """The last case of every generator: usually the one with every option on."""
    last = [list(generator.specs())[-1] for generator in GENERATORS]
    return {spec.name: spec for spec in last}


BESIDE = [arch for arch in ARCHITECTURES if arch != "9.0a"]
SAMPLED = 16  # one module of so many, rounded up


def architectures(spec: JitSpec, full: bool) -> list[str]:
    """What a representative is compiled for; see the top of this file."""
    if full:
        return list(ARCHITECTURES)
    turn = list(representatives()).index(spec.name)
    if turn % 2:
        return ["9.0a"]
    chosen = {"9.0a", BESIDE[turn // 2 % len(BESIDE)]}
    return [arch for arch in ARCHITECTURES if arch in chosen]


def others() -> list[JitSpec]:
    """Modules that are no representatives, without those that a bfloat16 one stands for."""
    known, found = {_in_bfloat16(spec) for spec in representatives().values()}, []
    for generator in GENERATORS:
        has_float16 = False
        for spec in sorted(generator.specs(), key=lambda spec: torch.float16 in _fields(spec)):
            stands_for, is_float16 = _in_bfloat16(spec), torch.float16 in _fields(spec)
            if spec.name in representatives():
                continue
            if stands_for not in known or (is_float16 and not has_float16):
                found.append(spec)
                has_float16 |= is_float16
            known.add(stands_for)
    return found


def sample_of_others() -> list[JitSpec]:
    """A fixed part of the others, of as many generators."""
    found: dict[type, JitSpec] = {}
    for spec in sorted(others(), key=lambda spec: zlib.crc32(spec.name.encode())):
        found.setdefault(type(spec.config), spec)
    return list(found.values())[: -(-len(others()) // SAMPLED)]


def _fields(spec: JitSpec) -> tuple[object, ...]:
    config = spec.config
    if config is None:
        return (spec.name,)
    return tuple(getattr(config, field.name) for field in dataclasses.fields(config))


def _in_bfloat16(spec: JitSpec) -> tuple[object, ...]:
    values = (torch.bfloat16 if value is torch.float16 else value for value in _fields(spec))
    return (type(spec.config), *values)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "spec" in metafunc.fixturenames:
        specs = SPECS if metafunc.config.getoption("--full") else representatives()
        metafunc.parametrize("spec", specs.values(), ids=specs)


def is_supported(spec: JitSpec, arch: str) -> bool:
    majors = spec.config.majors if spec.config else None
    return majors is None or int(arch.split(".")[0]) in majors


def test_the_sample_has_every_architecture_several_times():
    compiled = [arch for spec in representatives().values() for arch in architectures(spec, False)]
    assert all(compiled.count(arch) >= 2 for arch in ARCHITECTURES)


@pytest.mark.compiler
@pytest.mark.slow
def test_compiles_everywhere(spec: JitSpec, full: bool, strict_build: pytest.MonkeyPatch):
    targets = architectures(spec, full)
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", " ".join(targets))
    assert build_and_measure(spec) < most_memory(), "bytes of one compiler"
    kernels = read_kernels(spec.get_library_path())
    if not any(source.suffix == ".cu" for source in spec.sources):
        assert not kernels, "a module for the host alone"
        return
    wanted = {f"sm_{arch.replace('.', '')}" for arch in targets if is_supported(spec, arch)}
    assert {k.arch for k in kernels} == wanted, "exactly the architectures that were asked for"
    numbers = {sum(k.arch == arch for k in kernels) for arch in wanted}
    assert len(numbers) == 1, "the same kernels for each"
    spilled = spills(spec)
    assert not spilled


@pytest.mark.compiler
@pytest.mark.slow
def test_the_rest_compiles_for_turing_and_hopper(full: bool, strict_build: pytest.MonkeyPatch):
    if full:
        pytest.skip("--full compiles every module for every architecture")
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "7.5 9.0a")
    rest = sample_of_others()
    build_jit_specs(rest)
    spilled = [line for spec in rest for line in spills(spec)]
    assert rest and not spilled
