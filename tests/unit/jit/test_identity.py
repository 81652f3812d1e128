"""The identity of a module: what changes it, what does not."""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import ClassVar

import pytest
import torch
from jit_helpers import make_project

from flashinfer.jit import places, toolchain
from flashinfer.jit.config import ModuleConfig
from flashinfer.jit.core import JitSpec
from flashinfer.jit.fingerprint import split_targets, without_paths


@dataclasses.dataclass(frozen=True)
class Config(ModuleConfig):
    module: ClassVar[str] = "demo"
    op: str = "rmsnorm"
    dtype: torch.dtype = torch.bfloat16
    add: bool = False
    width: int = 4


def append(path, text):
    path.write_text(path.read_text() + text)


def edit_source(project, monkeypatch):
    append(project.root / "answer.cc", "// edited\n")


def edit_header(project, monkeypatch):
    append(project.root / "include/answer.h", "// edited\n")


def edit_header_of_header(project, monkeypatch):
    append(project.root / "include/deeper.h", "// edited\n")


def edit_cuda_source(project, monkeypatch):
    append(project.root / "store.cu", "// edited\n")


def new_header_shadows_external(project, monkeypatch):
    project.write("include/tvm/ffi/c_api.h", "#include_next <tvm/ffi/c_api.h>\n")


def change_version(project, monkeypatch):
    monkeypatch.setattr(places, "__version__", "99.0")
    monkeypatch.setattr("flashinfer.jit.spec.__version__", "99.0")


def change_abi(project, monkeypatch):
    monkeypatch.setattr(
        "flashinfer.jit.fingerprint.system_abi", lambda: {"system": "other", "tvm_ffi": "9.9"}
    )


def change_compiler(kind):
    def change(project, monkeypatch):
        real = toolchain.ingredients

        def other(uses_cuda):
            return {**real(uses_cuda), kind: "another version"}

        monkeypatch.setattr(toolchain, "ingredients", other)

    return change


def set_variable(name, value):
    return lambda project, monkeypatch: monkeypatch.setenv(name, value)


FLIPS = {
    "source": edit_source,
    "cuda source": edit_cuda_source,
    "header": edit_header,
    "header of a header": edit_header_of_header,
    "header that shadows an external one": new_header_shadows_external,
    "headers of the host": set_variable("FLASHINFER_EXTRA_CFLAGS", "-I /elsewhere"),
    "headers of the device": set_variable("FLASHINFER_EXTRA_CUDAFLAGS", "-I/elsewhere"),
    "package version": change_version,
    "abi": change_abi,
    "nvcc": change_compiler("nvcc"),
    "host compiler": change_compiler("host compiler"),
    "tvm_ffi": change_compiler("tvm_ffi"),
    "target": set_variable("FLASHINFER_CUDA_ARCH_LIST", "8.0"),
    "more targets": set_variable("FLASHINFER_CUDA_ARCH_LIST", "9.0a 8.0"),
    "host flags": set_variable("FLASHINFER_EXTRA_CFLAGS", "-DX=1"),
    "cuda flags": set_variable("FLASHINFER_EXTRA_CUDAFLAGS", "-DX=1"),
    "first of nvcc's own flags": set_variable("NVCC_PREPEND_FLAGS", "-DX=1"),
    "last of nvcc's own flags": set_variable("NVCC_APPEND_FLAGS", "-O0"),
    "link flags": set_variable("FLASHINFER_EXTRA_LDFLAGS", "-Wl,-O1"),
    "debug": set_variable("FLASHINFER_JIT_DEBUG", "1"),
    "lineinfo": set_variable("FLASHINFER_JIT_LINEINFO", "1"),
}


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
def test_ingredient_changes_identity(project, monkeypatch, flip):
    before = project.cuda_spec().fingerprint
    assert project.cuda_spec().fingerprint == before
    flip(project, monkeypatch)
    assert project.cuda_spec().fingerprint != before


@pytest.mark.parametrize(
    "options",
    [
        {"extra_cflags": ["-DY"]},
        {"extra_cuda_cflags": ["-DY"]},
        {"extra_ldflags": ["-Wl,-O1"]},
        {"use_fast_math": True},
        {"needs_device_linking": True},
        {"extra_cuda_cflags_by_source": {"store.cu": ["-DY"]}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_option_changes_identity(project, options):
    if by_source := options.get("extra_cuda_cflags_by_source"):
        options = {
            "extra_cuda_cflags_by_source": {project.root / k: v for k, v in by_source.items()}
        }
    assert project.cuda_spec(**options).fingerprint != project.cuda_spec().fingerprint


def test_mtime_does_not_count(project, compile_count):
    spec = project.spec()
    spec.build()
    before = spec.fingerprint
    for path in project.root.rglob("*.*"):
        os.utime(path, (1, 1))
    assert spec.fingerprint == before
    spec.build()
    assert compile_count() == 1


def test_place_does_not_count(project, tmp_path):
    elsewhere = tmp_path / "another place"
    shutil.copytree(project.root, elsewhere)
    assert make_project(elsewhere).cuda_spec().fingerprint == project.cuda_spec().fingerprint


def test_edit_rebuilds_and_revert_reuses(project, compile_count):
    header = project.root / "include/deeper.h"
    original = header.read_text()
    assert project.spec().build_and_load().answer() == 42
    header.write_text("#define MORE 3\n")
    assert project.spec().build_and_load().answer() == 43
    assert compile_count() == 2
    header.write_text(original)
    assert project.spec().build_and_load().answer() == 42
    assert compile_count() == 2


@pytest.mark.parametrize(
    "change",
    [{"op": "layernorm"}, {"dtype": torch.float16}, {"add": True}, {"width": 8}],
    ids=lambda change: next(iter(change)),
)
def test_each_field_of_a_config_counts(project, change):
    first, second = Config(), dataclasses.replace(Config(), **change)
    assert first.uri != second.uri
    source = [project.root / "answer.cc"]
    include = {"extra_include_paths": [project.root / "include"]}
    one = JitSpec.from_config(first, source, **include).identity().content
    assert one == JitSpec.from_config(Config(), source, **include).identity().content
    assert one != JitSpec.from_config(second, source, **include).identity().content


def test_config_names_and_defines():
    assert Config().uri == "demo_op_rmsnorm_dtype_bf16_add_0_width_4"
    assert Config().define_flags == [
        "-DFLASHINFER_CFG_OP=rmsnorm",
        "-DFLASHINFER_CFG_DTYPE=bfloat16",
        "-DFLASHINFER_CFG_ADD=0",
        "-DFLASHINFER_CFG_WIDTH=4",
    ]
    with pytest.raises(TypeError, match="op of a module configuration"):
        Config(op="a b").define_flags  # noqa: B018
    assert len(Config(op="x" * 300).uri) < 200
    assert Config(op="x" * 300).uri != Config(op="x" * 301).uri


def test_paths_in_flags_do_not_count(tmp_path):
    library = tmp_path / "libx.a"
    library.write_bytes(b"one")
    flags = ["-I/a", "-isystem", "/b", "-L/c", "-Wl,-rpath,/d", "-O2", str(library)]
    cleaned = without_paths(flags)
    assert cleaned[0] == "-O2" and cleaned[1].startswith("libx.a:") and len(cleaned) == 2
    library.write_bytes(b"other")
    assert without_paths(flags) != cleaned


def test_targets_are_read_from_flags():
    flags, archs = split_targets(
        ["-O2", "-gencode=arch=compute_90a,code=sm_90a", "-gencode", "arch=compute_80,code=sm_80",
         "--generate-code=arch=compute_90,code=[sm_90,compute_90]"]
    )  # fmt: skip
    assert flags == ["-O2"]
    assert archs == ("80", "90", "90a", "90+ptx")


def test_include_through_a_macro(project):
    source = project.root / "answer.cc"
    source.write_text(source.read_text().replace("<answer.h>", "WHICH"))
    with pytest.raises(RuntimeError, match="cannot be followed"):
        project.spec().identity()
    spec = project.spec(extra_cflags=["-DWHICH=<answer.h>"])
    before = spec.fingerprint
    edit_header_of_header(project, None)
    assert spec.fingerprint != before
    assert spec.build_and_load().answer() == 42


def test_source_included_by_another_is_compiled_once(project, compile_count):
    project.write("wrapper.cc", '#include "answer.cc"\n')
    spec = project.spec(sources=("answer.cc", "wrapper.cc"))
    assert spec.build_and_load().answer() == 42
    assert compile_count() == 1
