"""NVRTC has no host headers: what a kernel includes must lie in this repository, and no NVRTC is
needed to see that."""

from __future__ import annotations

import subprocess

import pytest

from flashinfer.jit.env import FLASHINFER_CSRC_DIR, FLASHINFER_INCLUDE_DIR
from flashinfer.jit.toolchain import find_host_compiler

SOURCES = sorted(FLASHINFER_CSRC_DIR.glob("*.cu"))


def preprocess(text: str) -> subprocess.CompletedProcess[str]:
    """`text` as NVRTC sees it: without the compiler's own headers."""
    compiler = find_host_compiler()
    if compiler is None:
        pytest.skip("needs a host C++ compiler: none of g++, c++, clang++ in PATH")
    folders = (FLASHINFER_INCLUDE_DIR, FLASHINFER_CSRC_DIR, FLASHINFER_CSRC_DIR / "nvrtc" / "std")
    options = ["-E", "-nostdinc", "-D__CUDACC_RTC__", *(f"-I{folder}" for folder in folders)]
    command = [compiler.path, "-x", "c++", *options, "-", "-o", "/dev/null"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


def test_kernels_include_no_host_header():
    assert SOURCES
    done = preprocess("".join(f'#include "{source}"\n' for source in SOURCES))
    assert done.returncode == 0, done.stderr


def test_a_host_header_is_seen():
    done = preprocess("#include <algorithm>\n")
    assert done.returncode != 0
    assert "algorithm" in done.stderr
