"""CuTe-DSL as a compiler of the JIT: compiling, caching, refusals, machines without it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashinfer import cute_dsl as public
from flashinfer.jit import BuildError, JitError, JitSpec, ToolchainError, cute_dsl, places
from flashinfer.jit.binary import read_kernels, read_opcodes
from flashinfer.jit.cute_dsl_moe import (
    GEMM_TILES,
    CuteDslGroupedGemmConfig,
    CuteDslMoeActivationConfig,
    CuteDslMoeFinalizeConfig,
    gen_cute_dsl_grouped_gemm_module,
    gen_cute_dsl_moe_activation_module,
    gen_cute_dsl_moe_finalize_module,
)
from flashinfer.jit.cute_dsl_norm import CuteDslNormConfig, gen_cute_dsl_norm_module

needs_dsl = pytest.mark.skipif(
    cute_dsl.find() is None, reason="nvidia-cutlass-dsl is not installed: the extra cute-dsl has it"
)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LDG, STG, LOCAL = 0x981, 0x986, (0x983, 0x387)

# Heads, odd numbers of vectors, one and several vectors a thread, a cluster; each kind of norm.
CONFIGS = [
    CuteDslNormConfig(BF16, BF16, 128),
    CuteDslNormConfig(torch.float16, FP8, 3000, add_residual=True),
    CuteDslNormConfig(BF16, FP8, 7168),
    CuteDslNormConfig(torch.float32, torch.float32, 4096, add_residual=True),
    CuteDslNormConfig(torch.float16, torch.float8_e5m2, 65536, subtract_mean=True),
]

# Few rows, the most rows of a tile that is turned, and weights that two CTAs share.
MIXTURE = [
    *(
        gen_cute_dsl_grouped_gemm_module(CuteDslGroupedGemmConfig(BF16, *GEMM_TILES[i]))
        for i in (0, 3, 5)
    ),
    gen_cute_dsl_moe_activation_module(CuteDslMoeActivationConfig(torch.float16)),
    gen_cute_dsl_moe_finalize_module(CuteDslMoeFinalizeConfig(BF16, torch.float32, 32)),
]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, for SM90."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    return tmp_path


@pytest.fixture
def without_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_dsl, "find", lambda: None)


def small() -> JitSpec:
    return gen_cute_dsl_norm_module(CONFIGS[0])


@needs_dsl
@pytest.mark.compiler
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.uri)
def test_compiles_to_vector_accesses_with_few_spills(config: CuteDslNormConfig, cache: Path):
    """64 registers a thread are worth two spilled values, which float16 with a residual has."""
    spec = gen_cute_dsl_norm_module(config)
    spec.build()
    (kernel,) = read_kernels(spec.get_library_path())
    allowed = 2 if config.dtype == torch.float16 and config.add_residual else 0
    assert kernel.arch == "sm_90a"
    assert kernel.stack_bytes <= 4 * allowed
    (code,) = read_opcodes(spec.get_library_path()).values()
    assert sum(map(code.count, LOCAL)) <= 2 * allowed
    # A thread has at most 4 vectors. Weight and bias of a layer norm take two loads for one.
    loads = 1 + config.add_residual + (4 if config.subtract_mean else 1)
    scale = config.out_dtype.itemsize == 1
    assert 0 < code.count(LDG) <= loads * 4 + scale
    assert 0 < code.count(STG) <= (1 + config.add_residual) * 4


@needs_dsl
@pytest.mark.compiler
@pytest.mark.parametrize("spec", MIXTURE, ids=lambda spec: spec.name)
def test_parts_of_a_mixture_have_no_spills(spec: JitSpec, cache: Path):
    spec.build()
    (kernel,) = read_kernels(spec.get_library_path())
    assert (kernel.arch, kernel.stack_bytes) == ("sm_90a", 0)
    (code,) = read_opcodes(spec.get_library_path()).values()
    assert not set(LOCAL) & set(code)


@needs_dsl
@pytest.mark.compiler
def test_second_process_compiles_nothing_and_needs_no_dsl(cache: Path):
    """What is compiled loads by its hash, in a process that has neither the DSL nor a compiler."""
    small().build()
    program = (
        "import sys\n"
        "from flashinfer.jit import cute_dsl, toolchain\n"
        "cute_dsl.find = lambda: None\n"
        "from flashinfer.jit.cute_dsl_norm import *\n"
        f"config = CuteDslNormConfig(torch.bfloat16, torch.bfloat16, {CONFIGS[0].hidden})\n"
        "module = gen_cute_dsl_norm_module(config).build_and_load()\n"
        "print(callable(module.norm), 'cutlass' in sys.modules)\n"
    )
    environment = {**os.environ, "FLASHINFER_DISABLE_JIT": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert ran.stdout.strip() == "True False", ran.stderr


@needs_dsl
@pytest.mark.compiler
def test_damaged_object_is_compiled_again(cache: Path):
    spec = small()
    spec.build()
    library = spec.get_library_path()
    whole = library.read_bytes()
    library.chmod(0o755)
    library.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert spec.find() is None
    assert callable(spec.build_and_load().norm)
    assert spec.find() is not None


@needs_dsl
@pytest.mark.compiler
def test_two_builds_have_the_same_kernel(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Variables of the DSL change nothing: the identity does not know them."""
    spec = small()
    spec.build()
    first = read_opcodes(spec.get_library_path())
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(cache / "other"))
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    spec.build()
    assert read_opcodes(spec.get_library_path()) == first


@needs_dsl
@pytest.mark.compiler
def test_error_of_a_kernel_is_named(cache: Path, tmp_path: Path):
    kernel = tmp_path / "broken.py"
    kernel.write_text("def instance(**config):\n    raise ValueError(f'no {config}')\n")
    config = CONFIGS[0]
    spec = JitSpec(config.uri, [kernel, *small().sources[:1]], config=config)
    with pytest.raises(BuildError, match="broken.py: error: ValueError: no {'dtype': 'bfloat16'"):
        spec.build()


def test_identity_follows_every_field_and_file(cache: Path, tmp_path: Path):
    config = CuteDslNormConfig(BF16, BF16, 4096)
    changes = {
        "dtype": torch.float32,
        "out_dtype": FP8,
        "hidden": 2048,
        "subtract_mean": True,
        "add_residual": True,
    }
    assert set(changes) == {field.name for field in dataclasses.fields(config)}
    known = {gen_cute_dsl_norm_module(config).identity(with_toolchain=False).content}
    for name, value in changes.items():
        more = {"out_dtype": value} if name == "dtype" else {}
        other = dataclasses.replace(config, **{name: value}, **more)
        known.add(gen_cute_dsl_norm_module(other).identity(with_toolchain=False).content)
    assert len(known) == 1 + len(changes)
    kernel, helper = tmp_path / "kernel.py", tmp_path / "helper.py"
    kernel.write_text("from .helper import one\n")
    helper.write_text("one = 1\n")
    spec = JitSpec("own", [kernel], config=config)
    before = spec.identity(with_toolchain=False).content
    helper.write_text("one = 2\n")
    assert spec.identity(with_toolchain=False).content != before


def test_one_target(cache: Path, monkeypatch: pytest.MonkeyPatch):
    dsl = cute_dsl.CuteDsl("0", (), "")
    with pytest.raises(JitError, match="for one target, got sm_90, sm_90a"):
        dsl.command([], ["90", "90a"])
    assert dsl.command(["-DA=1"], ["90a"])[-3:] == ["--arch", "90a", "-DA=1"]
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
    assert small().identity(with_toolchain=False).archs == ("90a",)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    with pytest.raises(RuntimeError, match=r"major versions \[9\]"):
        small().identity()


def test_absent_dsl_is_said_with_remedies(cache: Path, without_dsl: None):
    with pytest.raises(ToolchainError, match=r"nvidia-cutlass-dsl was not found(.|\n)*cute-dsl\]"):
        small().build()
    assert small().identity().toolchain == ""
    assert not places.jit_dir().exists() or not list(places.jit_dir().iterdir())
    assert not public.is_cute_dsl_available()
    assert not public.is_cute_dsl_experimental_available()
    with pytest.raises(ToolchainError, match="pip install"):
        public.require_cute_dsl_arch("cuda:0")


@pytest.mark.parametrize("hidden", [0, 12, 8 * 2048 * 8 + 64, 2049 * 8], ids=str)
def test_row_lengths_are_refused(hidden: int):
    with pytest.raises(ValueError, match=rf"`input` must have \d+ to 131072 columns.*got {hidden}"):
        CuteDslNormConfig(BF16, BF16, hidden)


def test_dtypes_are_refused():
    with pytest.raises(ValueError, match="`input` must have dtype"):
        CuteDslNormConfig(torch.float64, torch.float64, 4096)
    with pytest.raises(ValueError, match="`out` must have dtype"):
        CuteDslNormConfig(BF16, torch.float16, 4096)


def test_probes_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cute_dsl, "find", lambda: cute_dsl.CuteDsl("0", ("nowhere",), ""))
    assert public.is_cute_dsl_available() and not public.is_cute_dsl_experimental_available()
    assert public.is_cute_dsl_arch_supported(9, 0, native_only=True)
    assert public.is_cute_dsl_arch_supported(12, 0)
    assert not public.is_cute_dsl_arch_supported(12, 0, native_only=True)
    assert not public.is_cute_dsl_arch_supported(7, 5)
    assert not public.is_rubin_cute_dsl_available()
    assert public.availability.cute_dsl_compile_arch(9, 0) == "sm_90a"
    with pytest.raises(ValueError, match="must be one of 8.0, .*got 7.5"):
        public.availability.cute_dsl_compile_arch(7, 5)


@needs_dsl
@pytest.mark.compiler
def test_helpers_compile_to_their_instructions(tmp_path: Path):
    """All that no kernel of the package calls, in one kernel: no call, no local memory."""
    for file in cute_dsl.KERNELS.glob("*.py"):
        (tmp_path / file.name).symlink_to(file)
    source = tmp_path / "helpers.py"
    source.write_text(Path(__file__).with_name("cute_dsl_helpers_kernel.py").read_text())
    dsl = cute_dsl.require()
    command = [*dsl.command([], ["90a"]), "--out", str(tmp_path / "helpers.o"), str(source)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (kernel,) = read_kernels(tmp_path / "helpers.o")
    assert (kernel.arch, kernel.stack_bytes) == ("sm_90a", 0)
    assert (tmp_path / "helpers.h").is_file()
    (code,) = read_opcodes(tmp_path / "helpers.o").values()
    assert LDG in code and STG in code
