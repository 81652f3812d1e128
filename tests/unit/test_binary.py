"""Resources read back from a built library agree with what ptxas said while it compiled."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flashinfer.jit.binary import Kernel, _unqualified, read_kernels

SOURCE = """
namespace outer {
template <int N>
__global__ void __launch_bounds__(1024, 2) spilling_kernel(const float* a, float* b, int n) {
  float v[N];
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = a[i * n + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) b[i * n + threadIdx.x] = v[i] * v[N - 1 - i];
}
template __global__ void spilling_kernel<80>(const float*, float*, int);
}
__global__ void shared_kernel(float* a) {
  __shared__ float s[256];
  s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = s[255 - threadIdx.x];
}
"""


def nvcc() -> str:
    from flashinfer.jit.toolchain import require_toolkit

    return require_toolkit().nvcc


def test_short_names():
    assert (
        _unqualified("_ZN10flashinfer14rmsnorm_kernelI13__nv_bfloat16Li8EEEvPT_")
        == "rmsnorm_kernel"
    )
    assert _unqualified("_Z13shared_kernelPf") == "shared_kernel"
    assert _unqualified("plain") == "plain"


def test_no_device_code(tmp_path: Path):
    (tmp_path / "host.o").write_bytes(b"\x7fELF" + bytes(200))
    assert read_kernels(tmp_path / "host.o") == []


@pytest.mark.compiler
def test_agrees_with_ptxas(tmp_path: Path):
    source, library = tmp_path / "k.cu", tmp_path / "k.o"
    source.write_text(SOURCE)
    archs = {"sm_90a": "compute_90a", "sm_80": "compute_80"}
    codes = [f"-gencode=arch={virtual},code={real}" for real, virtual in archs.items()]
    log = subprocess.run(
        [nvcc(), "-c", "-Xptxas", "-v", *codes, str(source), "-o", str(library)],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    said = re.findall(
        r"entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers",
        log,
        flags=re.S,
    )
    expected = {(name, arch): (int(regs), int(stack)) for name, arch, stack, regs in said}
    kernels = read_kernels(library)
    assert len(expected) == 4
    assert {(k.name, k.arch): (k.registers, k.stack_bytes) for k in kernels} == expected
    by_name = {k.short_name: k for k in kernels if k.arch == "sm_90a"}
    assert by_name["spilling_kernel"].stack_bytes > 0
    assert by_name["shared_kernel"].stack_bytes == 0
    # The runtime reserves 1 KiB of static shared memory from sm_90 on.
    assert by_name["shared_kernel"].shared_bytes in (1024, 2048)


@pytest.mark.compiler
def test_compressed_code_is_refused(tmp_path: Path):
    source, library = tmp_path / "k.cu", tmp_path / "k.o"
    source.write_text(SOURCE)
    command = [
        nvcc(),
        "-c",
        "-arch=sm_90a",
        "--compress-mode=size",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, capture_output=True, check=True)
    with pytest.raises(ValueError, match="compressed"):
        read_kernels(library)


def test_kernel_is_a_value():
    assert Kernel("_Z1fv", "sm_80", 8, 0, 0) == Kernel("_Z1fv", "sm_80", 8, 0, 0)
