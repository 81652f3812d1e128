"""`flashinfer compare-sass`: equal code is equal under any name, and a difference is told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer.cli import main
from flashinfer.cli.sass import compare_kernels, read_module
from flashinfer.jit.binary import Kernel

ADD, MULTIPLY = bytes([0x21, 0x72]) + bytes(14), bytes([0x20, 0x72]) + bytes(14)
NAME, RENAMED = "_ZN3old10add_kernelEv", "_ZN6better10add_kernelEv"


def kernel(name: str = NAME, registers: int = 32) -> Kernel:
    return Kernel(name, "sm_90a", registers, 0, 1024)


def test_equal_kernels_differ_in_nothing():
    assert compare_kernels([(kernel(), ADD * 3)], [(kernel(), ADD * 3)]) == []


def test_a_renamed_kernel_is_matched_by_its_code():
    others = [(kernel(RENAMED), MULTIPLY), (kernel(RENAMED + "2"), ADD)]
    assert compare_kernels([(kernel(), ADD), (kernel(NAME + "2"), MULTIPLY)], others) == []


def test_a_difference_is_told():
    old, new = (kernel(), ADD * 3), (kernel(RENAMED, registers=40), ADD + MULTIPLY + ADD * 2)
    assert compare_kernels([old], [new]) == [
        "add_kernel (sm_90a): registers 32 -> 40",
        "add_kernel (sm_90a): 3 -> 4 instructions, from number 1 on; +1 of 0x220",
    ]


def test_kernels_of_one_side_only_are_told():
    assert compare_kernels([(kernel(), ADD)], []) == ["add_kernel (sm_90a): only before"]
    assert compare_kernels([], [(kernel(), ADD)]) == ["add_kernel (sm_90a): only now"]


def test_a_folder_without_modules_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    built: list[object] = []
    monkeypatch.setattr("flashinfer.cli.sass.build_jit_specs", built.extend)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    result = CliRunner().invoke(main, ["compare-sass", str(tmp_path), "attention_plan"])
    assert result.exit_code == 1 and "is no checkout" in result.output
    assert built == [], "nothing is built before the refusal"


def test_a_checkout_that_does_not_build_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").touch()
    (tmp_path / "flashinfer" / "aot.py").write_text("raise SystemExit(1)\n")
    result = CliRunner().invoke(main, ["compare-sass", str(tmp_path), "attention_plan"])
    assert result.exit_code == 1 and f"the modules of {tmp_path} could not be" in result.output


@pytest.mark.compiler
def test_constants_and_instructions_are_read(tmp_path: Path):
    """Two kernels whose code differs in one constant; names and paths do not count."""
    from flashinfer.jit.toolchain import require_toolkit

    def compiled(name: str, factor: str) -> Path:
        source, library = tmp_path / f"{name}.cu", tmp_path / f"{name}.o"
        source.write_text(
            f"struct {name} {{}};\n"
            "template <typename T> __global__ void scale_kernel(float* a) {"
            f" a[threadIdx.x] *= {factor}; }}\n"
            f"template __global__ void scale_kernel<{name}>(float*);\n"
        )
        command = [require_toolkit().nvcc, "-c", "-arch=sm_90a", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        return library

    first, same, other = (
        read_module(compiled(*case))
        for case in (("one", "3.f"), ("another", "3.f"), ("third", "5.f"))
    )
    assert compare_kernels(first, same) == []
    (line,) = compare_kernels(first, other)
    assert line.startswith("scale_kernel (sm_90a): ") and line.endswith("the same opcodes")
