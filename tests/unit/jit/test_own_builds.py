"""Builds with ninja of files that are no module of the package."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from flashinfer.jit import BuildError, core, cpp_ext

SOURCE = """
__global__ void nothing() {}
extern "C" __attribute__((visibility("default"))) int answer() { return 42; }
"""


@pytest.mark.compiler
def test_a_generated_ninja_file_builds(tmp_path: Path):
    source, ninja = tmp_path / "mine.cu", tmp_path / "build.ninja"
    source.write_text(SOURCE)
    flags = ["-DUNUSED=1", *core.sm90a_nvcc_flags]
    ninja.write_text(
        cpp_ext.generate_ninja_build_for_op("mine", [source], None, flags, None, [tmp_path])
    )
    cpp_ext.run_ninja(tmp_path, ninja, verbose=False, max_jobs=1)
    assert ctypes.CDLL(str(tmp_path / "mine.so")).answer() == 42
    assert "-DUNUSED=1" in ninja.read_text() and f"-I{tmp_path}" in ninja.read_text()
    source.write_text("no C++ at all")
    with pytest.raises(BuildError, match="mine.cu"):
        cpp_ext.run_ninja(tmp_path, ninja, verbose=False)


def test_targets_are_chosen_once(monkeypatch: pytest.MonkeyPatch):
    common = cpp_ext.build_common_cflags("/opt/cuda", [Path("/mine")])
    assert "-I/mine" in common and "/opt/cuda/include" in common
    chosen = cpp_ext.build_cuda_cflags(common, core.sm89_nvcc_flags)
    targets = [flag for flag in chosen if "gencode" in flag]
    assert targets == ["-gencode=arch=compute_89,code=sm_89"]
    assert sum("gencode" in flag for flag in cpp_ext.build_cuda_cflags(common)) >= 1
    assert cpp_ext.build_cflags(["-Ia"], ["-DB"])[:1] == ["-Ia"]
    assert cpp_ext.build_cflags(["-Ia"], ["-DB"])[-1] == "-DB"


def test_cubins_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="embedded_cubins"):
        cpp_ext.generate_ninja_build_for_op(
            "mine", [tmp_path / "a.cu"], None, None, None, None, embedded_cubins={"a": tmp_path}
        )
