"""The NVRTC backend: a module without nvcc and a host compiler, from its prebuilt host part."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashinfer import jit
from flashinfer.cli.compilers import compare
from flashinfer.cli.modules import find_specs
from flashinfer.cli.sass import compare_kernels, read_module
from flashinfer.jit import host_parts, host_parts_build, nvrtc, nvrtc_compile
from flashinfer.jit.activation import gen_act_and_mul_module
from flashinfer.jit.attention.plan import gen_attention_plan_module
from flashinfer.jit.binary import Kernel, read_kernels
from flashinfer.jit.core import JitSpec
from flashinfer.jit.env import FLASHINFER_CSRC_DIR, FLASHINFER_INCLUDE_DIR

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


@pytest.mark.parametrize(
    "pattern",
    [
        "gemm_dtype_a_bf16_dtype_b_bf16_dtype_out_bf16_tile_rows_128_*_groups_batch_*",
        *(
            pytest.param(pattern, marks=pytest.mark.full)
            for pattern in (
                "attention_bf16_bf16_bf16_qk128_vo128_tile128_ragged_causal_fa3",
                "batch_mla_backend_fa3_dtype_q_bf16_dtype_kv_bf16_*",
                "weight_gemm_*_mxfp4_*_tokens_8_*_swiglu_gate_last_streams_1_columns_0",
                "chunk_delta_rule_dtype_bf16_state_dtype_f32_head_dim_k_128",
                "ssd_dtype_bf16_state_dtype_f32_dt_dtype_bf16_dstate_128",
                "mqa_logits_dtype_out_f32_heads_64_queries_1_paged_1",
            )
        ),
    ],
)
def test_both_compilers_lay_out_alike(
    pattern: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Kernels of tensor maps and warpgroups: parameters, shared memory, stack."""
    if nvrtc.library() is None:
        pytest.skip("needs libnvrtc: pip install nvidia-cuda-nvrtc")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_HOST_DIR", str(tmp_path))
    (module,) = find_specs([pattern])
    assert host_parts_build.build([module], tmp_path) == {}
    kernels = {}
    for compiler in ("nvcc", "nvrtc"):
        monkeypatch.setenv("FLASHINFER_COMPILER", compiler)
        module.build()
        kernels[compiler] = read_module(module.get_library_path())
    assert compare(kernels["nvcc"], kernels["nvrtc"]).worse == []
    index = host_parts.read_index(tmp_path).parts[module.name]
    assert index["parameters"] == {k.name: k.parameter_bytes for k, _ in kernels["nvcc"]}


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


def test_folders_of_host_parts_grow_and_lose_what_is_replaced(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "host"
    shutil.copytree(parts, folder)
    monkeypatch.setenv("FLASHINFER_HOST_DIR", str(folder))
    (before,) = folder.glob("*.xz")
    plan = gen_attention_plan_module()  # it has no kernels and is soon compiled
    assert host_parts_build.build([plan], folder) == {}
    index = host_parts.read_index(folder)
    assert set(index.parts) == {NAME, plan.name} and len(index.archives) == 2
    assert host_parts_build.build([plan, spec()], folder) == {}
    index = host_parts.read_index(folder)
    assert set(index.parts) == {NAME, plan.name} and len(index.archives) == 1
    (after,) = folder.glob("*.xz")
    assert after != before and list(index.archives) == [after.name]
    for name, known in index.parts.items():
        part = host_parts.find(name, known["content"])
        assert part is not None
        library = nvrtc_compile.unpacked(*part.library.arguments())
        assert hashlib.sha256(library).hexdigest() == part.library.sha256
        assert library[:4] == b"\x7fELF"


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
    (archive,) = bare.glob("*.xz")
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(jit.JitError, match=f"host parts .*{archive.name} are damaged"):
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


def test_kernels_with_other_parameters_than_the_launcher_s_are_refused(bare: Path):
    """As when a type is aligned otherwise in the headers that NVRTC reads."""
    index = json.loads((bare / host_parts.INDEX).read_text())
    parameters = index["parts"][NAME]["parameters"]
    assert len(parameters) == 2 and len(set(parameters.values())) == 1
    (size,) = set(parameters.values())
    index["parts"][NAME]["parameters"] = dict.fromkeys(parameters, size + 8)
    (bare / host_parts.INDEX).write_text(json.dumps(index))
    said = f"act_and_mul.*sm_90a.* has {size} bytes of parameters, its launcher passes {size + 8}"
    with pytest.raises(jit.BuildError, match=said):
        spec().build()
    assert spec().find() is None


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


def test_parameters_are_read_from_ptx(tmp_path: Path):
    text = b"""
        .visible .entry _Z1av(.param .align 128 .b8 _Z1av_param_0[1792])
        .visible .entry _Z1bv(
            .param .u32 _Z1bv_param_0,
            .param .u64 .ptr .global .align 16 _Z1bv_param_1,
            .param .align 4 .b8 _Z1bv_param_2[12],
            .param .u8 _Z1bv_param_3
        )
        .visible .entry _Z1cv()"""
    (tmp_path / "device").write_bytes(b"\0\xff" + text + b"\0")
    found = host_parts_build.parameters_of([tmp_path / "device"])
    assert found == {"_Z1av": 1792, "_Z1bv": 29, "_Z1cv": 0}


def test_kernels_take_no_type_of_the_driver_s_headers():
    """Its tensor map is aligned to 64 bytes by CUDA 12 and to 128 by CUDA 13."""
    headers = FLASHINFER_INCLUDE_DIR.rglob("*.*h")
    naming = {path.name for path in headers if "CUtensorMap" in _device_code(path.read_text())}
    assert naming == set()


def _device_code(text: str) -> str:
    """A header as NVRTC compiles it, without comments."""
    host = r"#ifndef __CUDACC_RTC__\n.*?#endif  // __CUDACC_RTC__"
    return re.sub(r"//.*", "", re.sub(host, "", text, flags=re.DOTALL))


def test_cleared_vectors_are_no_variables_in_global_memory():
    """NVRTC makes one, named after its kernel, of `vector = {}`; kernels load it."""
    if nvrtc.library() is None:
        pytest.skip("needs libnvrtc: pip install nvidia-cuda-nvrtc")
    text = f"""#include "{nvrtc.prelude()}"
        #include <flashinfer/common/vec.cuh>
        template <typename T> __global__ void copy(T* x, int n) {{
          flashinfer::Vector<T, 8> vector;
          vector.clear();
          if (threadIdx.x < n) vector.load(x + threadIdx.x * 8);
          vector.store(x + (n + threadIdx.x) * 8);
        }}"""
    options = nvrtc.options(["-std=c++17"], [FLASHINFER_INCLUDE_DIR])
    kernels = {"_Z4copyIjEvPT_i": "copy<unsigned int>"}
    cubin = nvrtc_compile.Compiler(nvrtc.library()).cubin(text, "90a", kernels, options)
    assert b"_Z4copyIjEvPT_i" in cubin and re.search(rb"_Z4copyIjEvPT_i\$\d", cubin) is None


def test_a_module_without_kernels_is_its_host_part():
    assert nvrtc_compile.with_cubins(b"host", {}) == b"host"
    whole = nvrtc_compile.with_cubins(b"host", {"90a": b"cubin"})
    offset = int.from_bytes(whole[-16:-8], "little")
    assert whole[-8:] == b"FICUBIN1" and whole[offset : offset + 4] == b"\x50\xed\x55\xba"


def test_a_flag_without_counterpart_is_refused():
    with pytest.raises(jit.ToolchainError, match="no counterpart of nvcc's flag -maxrregcount=64"):
        nvrtc.options(["-std=c++17", "-maxrregcount=64"], [])


def test_host_code_of_launchers_is_hidden_from_nvrtc():
    for source in sorted(FLASHINFER_CSRC_DIR.glob("*.cu")):
        assert "#ifndef __CUDACC_RTC__" in source.read_text(), source


def test_compilers_are_compared_by_kernel():
    def kernel(name: str, registers: int = 32, stack: int = 0, parameters: int = 8) -> Kernel:
        return Kernel(name, "sm_90a", registers, stack, 0, parameters)

    old = [(kernel("_Z1av"), bytes(160)), (kernel("_Z1bv"), bytes(160))]
    found = compare(old, [(kernel("_Z1av"), bytes(160)), (kernel("_Z1bv", 30), bytes(176))])
    assert (found.equal, found.kernels, found.registers, found.worse) == (1, 2, -2, [])
    assert found.instructions == pytest.approx(0.1)
    found = compare(old, [(kernel("_Z1av", stack=8), bytes(160))])
    assert found.worse == [
        "_Z1bv (sm_90a) is in one of them",
        "a (sm_90a) uses 8 bytes of stack, not 0",
    ]
    found = compare(old[:1], [(kernel("_Z1av", parameters=16), bytes(160))])
    assert found.worse == ["a (sm_90a) has 16 bytes of parameters, not 8"]
