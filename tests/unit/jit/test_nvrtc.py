"""The NVRTC backend: a module without nvcc and a host compiler, from its prebuilt host part."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashinfer import jit
from flashinfer.cli.sass import compare_kernels, read_module
from flashinfer.jit import host_parts, host_parts_build, nvrtc, nvrtc_compile
from flashinfer.jit.activation import gen_act_and_mul_module
from flashinfer.jit.binary import read_kernels
from flashinfer.jit.core import JitSpec

pytestmark = pytest.mark.compiler
NAME = "act_and_mul_activation_silu_dtype_bf16"


def spec(dtype: torch.dtype = torch.bfloat16) -> JitSpec:
    return gen_act_and_mul_module("silu", dtype)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the host part of one module."""
    if nvrtc.library() is None:
        pytest.skip("needs libnvrtc: pip install nvidia-cuda-nvrtc")
    folder = tmp_path_factory.mktemp("host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        assert host_parts_build.build([spec()], folder) == {}
    return folder


@pytest.fixture
def bare(parts: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that has the host part and NVRTC, and neither nvcc nor a host compiler."""
    folder = tmp_path / "host"
    shutil.copytree(parts, folder)
    library = nvrtc.library()
    monkeypatch.setenv("FLASHINFER_HOST_DIR", str(folder))
    monkeypatch.setenv("FLASHINFER_NVRTC", str(library))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("flashinfer.jit.toolchain.SYSTEM_TOOLKIT", "/nonexistent")
    monkeypatch.setattr("flashinfer.jit.toolchain._pypi_toolkits", lambda: [])
    return folder


def test_a_module_is_built_and_loaded_without_compilers(bare: Path):
    module = spec().build_and_load()
    entry = spec().find()
    assert entry is not None and entry.manifest["library_sha256"]
    assert set(entry.manifest["ingredients"]["toolchain"]) == {
        *("host part", "nvrtc", "standard headers", "tvm_ffi")
    }
    kernels = read_kernels(entry.library)
    assert {kernel.arch for kernel in kernels} == {"sm_90a"} and len(kernels) == 2
    with pytest.raises(TypeError, match="`out` must be a torch.Tensor, got None"):
        module.act_and_mul(None, torch.zeros(2, 2), None)
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="must be a CUDA tensor|`input` .*cpu|CUDA"):
        module.act_and_mul(torch.zeros(2, 8, dtype=torch.bfloat16), x, None)


def test_a_second_call_compiles_nothing(bare: Path):
    spec().build()
    entry = spec().find()
    spec().build()
    again = spec().find()
    assert entry and again and entry.manifest == again.manifest


def test_machine_code_is_that_of_nvcc(parts: Path, monkeypatch: pytest.MonkeyPatch):
    """Kernels without indexed shared memory; docs/design/nvrtc.md says how others differ."""
    monkeypatch.setenv("FLASHINFER_HOST_DIR", str(parts))
    libraries = {}
    for compiler in ("nvcc", "nvrtc"):
        monkeypatch.setenv("FLASHINFER_COMPILER", compiler)
        spec().build()
        libraries[compiler] = spec().get_library_path()
    kernels = {name: read_module(path) for name, path in libraries.items()}
    assert libraries["nvcc"] != libraries["nvrtc"] and len(kernels["nvrtc"]) == 2
    release = subprocess.run(
        [sys.executable, nvrtc.PROGRAM, "--nvrtc", str(nvrtc.library()), "--version"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    from flashinfer.jit.cpp_ext import get_cuda_version

    if release != str(get_cuda_version()):
        pytest.skip(f"NVRTC is of CUDA {release}, nvcc of {get_cuda_version()}")
    assert compare_kernels(kernels["nvcc"], kernels["nvrtc"]) == []


def test_several_architectures_are_in_one_module(bare: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a 12.0f")
    spec().build()
    kernels = read_kernels(spec().get_library_path())
    assert sorted({kernel.arch for kernel in kernels}) == ["sm_120f", "sm_80", "sm_90a"]


def test_an_unserved_module_is_refused_by_name(bare: Path, monkeypatch: pytest.MonkeyPatch):
    other = spec(torch.float16)
    with pytest.raises(
        jit.ToolchainError, match="No host C\\+\\+ compiler(?s:.*)note: " + other.name
    ):
        other.build()
    monkeypatch.setenv("FLASHINFER_COMPILER", "nvrtc")
    with pytest.raises(jit.ToolchainError, match=f"{other.name} .*no prebuilt host part"):
        other.build()
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", "-DX=1")
    with pytest.raises(jit.ToolchainError, match=f"{NAME} .*other sources or flags"):
        spec().build()


def test_a_family_that_is_not_served_says_so(bare: Path, monkeypatch: pytest.MonkeyPatch):
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.registry import preset_specs

    (plan,) = (s for s in preset_specs("llama-bf16") if s.name == "attention_plan")
    left_out = host_parts_build.build([plan], bare)
    assert left_out == {"attention_plan": "its family has not run through NVRTC on a GPU"}
    with pytest.raises(
        jit.ToolchainError, match="attention_plan .*only act_and_mul, norm, page are"
    ):
        plan.build()
    assert host_parts.is_served(gen_page_module().name) and host_parts.is_served(NAME)
    assert not host_parts.is_served("fused_rmsnorm_dtype_bf16")


def test_without_nvrtc_the_error_says_what_is_missing(bare: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASHINFER_NVRTC")
    monkeypatch.setattr(nvrtc, "_search", lambda *roots: None)
    with pytest.raises(jit.ToolchainError, match="libnvrtc was not found"):
        spec().build()
    monkeypatch.setenv("FLASHINFER_NVRTC", "/no/libnvrtc.so")
    with pytest.raises(
        jit.ToolchainError, match="FLASHINFER_NVRTC='/no/libnvrtc.so' is not a file"
    ):
        spec().build()


def test_a_damaged_host_part_is_refused_by_name(bare: Path):
    library = bare / f"{NAME}.so.xz"
    library.write_bytes(library.read_bytes()[:-1])
    with pytest.raises(jit.JitError, match=f"host part .*{NAME}.so.xz is damaged"):
        spec().build()


def test_a_folder_that_others_can_write_is_refused(bare: Path):
    bare.chmod(0o777)
    with pytest.raises(jit.JitError, match="everybody can write it"):
        spec().build()


def test_a_host_part_of_another_source_is_not_used(bare: Path, monkeypatch: pytest.MonkeyPatch):
    index = json.loads((bare / host_parts.INDEX).read_text())
    index["parts"][NAME]["content"] = "0" * 24
    (bare / host_parts.INDEX).write_text(json.dumps(index))
    with pytest.raises(jit.ToolchainError, match="compiled from other sources or flags"):
        spec().build()


def test_kernels_that_do_not_compile_are_reported(bare: Path):
    index = json.loads((bare / host_parts.INDEX).read_text())
    kernels = index["parts"][NAME]["kernels"]
    index["parts"][NAME]["kernels"] = dict.fromkeys(kernels, "flashinfer::no_such_kernel<1>")
    (bare / host_parts.INDEX).write_text(json.dumps(index))
    with pytest.raises(jit.BuildError, match="first error: .*no_such_kernel"):
        spec().build()


def test_a_library_that_is_not_nvrtc_is_refused(bare: Path, monkeypatch, tmp_path: Path):
    wrong = tmp_path / "libnvrtc.so"
    wrong.write_bytes(b"not a library")
    monkeypatch.setenv("FLASHINFER_NVRTC", str(wrong))
    with pytest.raises(jit.ToolchainError, match="NVRTC failed"):
        spec().build()


def test_names_of_kernels_become_expressions():
    expression = host_parts_build.name_expression
    assert expression("void f<a::T, (a::E)0, 2>(a::Params)") == "f<a::T, (a::E)0, 2>"
    assert expression("a::g(a::Params<(a::E)1>)") == "a::g"
    assert host_parts_build.demangled(b"_ZN1a1gEi") == "a::g(int)"


def test_a_module_without_kernels_is_its_host_part():
    assert nvrtc_compile.with_cubins(b"host", {}) == b"host"
    whole = nvrtc_compile.with_cubins(b"host", {"90a": b"cubin"})
    offset = int.from_bytes(whole[-16:-8], "little")
    assert whole[-8:] == b"FICUBIN1" and whole[offset : offset + 4] == b"\x50\xed\x55\xba"


def test_a_flag_without_counterpart_is_refused():
    with pytest.raises(jit.ToolchainError, match="no counterpart of nvcc's flag -maxrregcount=64"):
        nvrtc.options(["-std=c++17", "-maxrregcount=64"], [])
