"""What FlashInfer does, on this machine: `make demo`, or `python -m examples.demo`.

Compiles the modules of three calls from an empty cache. With a GPU it then runs them, checks them
against PyTorch and measures them. Without one it reads the built libraries and computes the same
calls with PyTorch on the CPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

# An empty cache, so that the compile times are real. Set before anything looks at it.
_cache = tempfile.TemporaryDirectory(prefix="flashinfer-demo-")
os.environ["FLASHINFER_WORKSPACE_BASE"] = _cache.name
os.environ["FLASHINFER_LOGGING_LEVEL"] = "WARNING"  # the demo reports for itself

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tabulate import tabulate  # noqa: E402

import flashinfer  # noqa: E402
from flashinfer.jit import JitSpec, current_compilation_context, toolchain  # noqa: E402
from flashinfer.jit.activation import gen_act_and_mul_module  # noqa: E402
from flashinfer.jit.binary import read_kernels  # noqa: E402
from flashinfer.jit.norm import NormConfig, gen_norm_module  # noqa: E402

BF16 = torch.bfloat16
EPS = 1e-6
HOPPER = {(9, "0a")}


@dataclass(frozen=True)
class Op:
    """One call of the demo.

    Attributes
    ----------
    name : str
        Public function.
    spec : JitSpec
        The module it needs.
    width : int
        Columns of its input per column of its output.
    tensors_moved : int
        Tensors of the output's size that are read or written.
    call : callable
        (input, residual, weight) -> result, through the public API. May change input and residual.
    expected : callable
        The same with PyTorch, in the precision of its arguments.
    """

    name: str
    spec: JitSpec
    width: int
    tensors_moved: int
    call: Callable[..., torch.Tensor]
    expected: Callable[..., torch.Tensor]


def _fused_add_rmsnorm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    flashinfer.fused_add_rmsnorm(x, r, w, EPS)
    return x


OPS = [
    Op(
        "rmsnorm",
        gen_norm_module(NormConfig(BF16, BF16)),
        width=1,
        tensors_moved=2,
        call=lambda x, r, w: flashinfer.rmsnorm(x, w, EPS),
        expected=lambda x, r, w: F.rms_norm(x, w.shape, w, EPS),
    ),
    Op(
        "fused_add_rmsnorm",
        gen_norm_module(NormConfig(BF16, BF16, add_residual=True)),
        width=1,
        tensors_moved=4,
        call=_fused_add_rmsnorm,
        expected=lambda x, r, w: F.rms_norm(x + r, w.shape, w, EPS),
    ),
    Op(
        "silu_and_mul",
        gen_act_and_mul_module("silu", BF16),
        width=2,
        tensors_moved=3,
        call=lambda x, r, w: flashinfer.silu_and_mul(x),
        expected=lambda x, r, w: F.silu(x[:, : w.numel()]) * x[:, w.numel() :],
    ),
]


def inputs(op: Op, rows: int, columns: int, device: str) -> tuple[torch.Tensor, ...]:
    """Input, residual and weight of a call."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(BF16)

    return normal(rows, columns * op.width), normal(rows, columns), normal(columns)


def error_of(op: Op, rows: int, columns: int, device: str) -> float:
    """Largest error of a call relative to PyTorch in float64, in units of bfloat16's last place."""
    x, r, w = inputs(op, rows, columns, device)
    expected = op.expected(x.double(), r.double(), w.double())
    got = op.call(x, r, w).double()
    last_place = torch.finfo(BF16).eps * expected.abs().clamp_min(2.0**-10)
    return ((got - expected).abs() / last_place).max().item()


def build() -> None:
    """Compile and load each module from an empty cache, with timings."""
    archs = ", ".join(
        f"sm_{a}{b}" for a, b in sorted(current_compilation_context.TARGET_CUDA_ARCHS)
    )
    toolkit = toolchain.require_toolkit()
    print(f"Compiling for {archs} with nvcc {'.'.join(map(str, toolkit.release))}, cache empty")
    rows = []
    for number, op in enumerate(OPS, 1):
        print(f"  [{number}/{len(OPS)}] {op.name:20s}", end="", flush=True)
        start = time.perf_counter()
        op.spec.build()
        compiled = time.perf_counter()
        op.spec.load()
        loaded = time.perf_counter()
        print(f"{compiled - start:6.1f} s")
        size = op.spec.get_library_path().stat().st_size / 1024
        times = (f"{compiled - start:.2f}", f"{1e3 * (loaded - compiled):.1f}", f"{size:.0f}")
        rows.append((op.name, op.spec.name, *times))
    headers = ["call", "module", "compile s", "load ms", "KiB"]
    print("\n" + tabulate(rows, headers, disable_numparse=True))


def show_binaries() -> None:
    """What ptxas made of the kernels, read back from the libraries."""
    rows = []
    for op in OPS:
        for kernel in read_kernels(op.spec.get_library_path()):
            spills = "none" if kernel.stack_bytes == 0 else f"{kernel.stack_bytes} B stack"
            shared = kernel.shared_bytes
            rows.append((op.name, kernel.short_name, kernel.arch, kernel.registers, spills, shared))
    headers = ["call", "kernel", "arch", "registers", "spills", "static smem B"]
    print("\nRead back from the built libraries:\n")
    print(tabulate(rows, headers))


def without_gpu() -> None:
    from flashinfer.reference_backend import reference_backend

    show_binaries()
    rows, columns = 64, 4096
    print(
        f"\nThe same calls on the CPU, in PyTorch (reference backend), {rows} x {columns} bf16:\n"
    )
    with reference_backend():
        table = [(op.name, f"{error_of(op, rows, columns, 'cpu'):.2f}") for op in OPS]
    print(tabulate(table, ["call", "largest error (bf16 last places)"], disable_numparse=True))
    print(
        "\nNO GPU WAS USED: this machine has none that PyTorch can see. The kernels above were\n"
        "compiled and loaded but not run; the numbers come from PyTorch on the CPU. On a machine\n"
        "with an NVIDIA GPU `make demo` runs the kernels and measures them."
    )


def with_gpu() -> None:
    from flashinfer.testing import bench_gpu_time, copy_bandwidth_tb_per_sec

    peak = copy_bandwidth_tb_per_sec()
    print(f"\n{torch.cuda.get_device_name()}, copy bandwidth {peak:.2f} TB/s\n")
    table = []
    for op in OPS:
        for rows, columns in ((1, 4096), (1024, 8192), (16384, 8192)):
            error = error_of(op, rows, columns, "cuda")
            arguments = inputs(op, rows, columns, "cuda")
            times = bench_gpu_time(
                op.call, input_args=arguments, enable_cupti=True, use_cuda_graph=True
            )
            us = 1e3 * statistics.median(times)
            rate = op.tensors_moved * rows * columns * BF16.itemsize / us / 1e6
            share = f"{100 * rate / peak:.0f} %"
            cells = (
                f"{us:.2f}",
                f"{rate:.3f}",
                share,
                f"{error:.2f}",
                "ok" if error <= 1 else "WRONG",
            )
            table.append((op.name, f"{rows} x {columns}", *cells))
    headers = ["call", "shape", "µs", "TB/s", "of copy", "error (last places)", "vs PyTorch"]
    print(tabulate(table, headers, disable_numparse=True))
    if any(row[-1] != "ok" for row in table):
        sys.exit("a result differs from PyTorch by more than rounding")


def main() -> None:
    print(f"FlashInfer {flashinfer.__version__}, PyTorch {torch.__version__}\n")
    has_gpu = torch.cuda.is_available()
    if not has_gpu and "FLASHINFER_CUDA_ARCH_LIST" not in os.environ:
        current_compilation_context.TARGET_CUDA_ARCHS = HOPPER
    build()
    with_gpu() if has_gpu else without_gpu()


if __name__ == "__main__":
    main()
