"""Every module compiles for every architecture of the README, without a warning or a spill."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashinfer.jit import JitSpec, current_compilation_context, registry
from flashinfer.jit.binary import read_kernels
from flashinfer.support import ARCHITECTURES

# Examples and tests register generators too; this is about the package's own.
SPECS = {
    spec.name: spec
    for generator in registry.generators().values()
    if generator.function.__module__.startswith("flashinfer.")
    for spec in generator.specs()
}


@pytest.fixture
def all_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", " ".join(ARCHITECTURES))
    monkeypatch.setenv(
        "FLASHINFER_EXTRA_CUDAFLAGS", "-Werror all-warnings -Xcompiler=-Wall,-Wextra"
    )
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-Wall -Wextra -Werror")
    monkeypatch.setenv("MAX_JOBS", "2")
    current_compilation_context.reset()
    yield
    current_compilation_context.reset()


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_compiles_everywhere(spec: JitSpec, all_architectures: None):
    spec.build()
    kernels = read_kernels(spec.get_library_path())
    wanted = {f"sm_{arch.replace('.', '')}" for arch in ARCHITECTURES}
    by_arch = {arch: [k for k in kernels if k.arch == arch] for arch in wanted}
    assert {k.arch for k in kernels} == wanted, "exactly the architectures that were asked for"
    assert len({len(of_arch) for of_arch in by_arch.values()}) == 1, "the same kernels for each"
    spilled = [f"{k.short_name} {k.arch}: {k.stack_bytes} bytes" for k in kernels if k.stack_bytes]
    assert not spilled
