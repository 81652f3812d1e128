"""Host time of a launch through NVRTC's path beside nvcc's, in one process.

    python benchmarks/bench_compiler_paths.py [--limit 1.05]

Each module is built on both paths, and both libraries are called in turns with the same tensors.
The fastest round counts: other processes only ever add time. A GPU is needed, nvcc and libnvrtc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from bench_host_overhead import queued_us
from harness import gpu_complaint
from tabulate import tabulate

from flashinfer.env import child_environment

COMPILERS = ("nvcc", "nvrtc")
NORM = "norm_dtype_bf16_out_dtype_bf16_subtract_mean_0_add_residual_0"
ACTIVATION = "act_and_mul_activation_silu_dtype_bf16"


def build(compiler: str, folder: Path) -> dict[str, Any]:
    """Build the modules on one path and load them, by name."""
    changes = {
        "FLASHINFER_COMPILER": compiler,
        "FLASHINFER_WORKSPACE_BASE": str(folder / compiler),
        "FLASHINFER_HOST_DIR": str(folder / "host"),
    }

    def run(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", *words, NORM, ACTIVATION],
            env=child_environment(changes), stdout=subprocess.PIPE, text=True, check=True,
        ).stdout  # fmt: skip

    if compiler == "nvrtc":
        run("flashinfer", "build-host-parts", str(folder / "host"))
    built = [json.loads(line) for line in run("flashinfer.cli.cold_build").splitlines()]
    return {one["name"]: tvm_ffi.load_module(one["library"]) for one in built}


def calls(modules: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The calls to time, on tensors so small that the GPU never keeps the host waiting."""
    x, out = torch.ones(2, 1, 4096, dtype=torch.bfloat16, device="cuda").unbind()
    w, half = torch.ones(4096, dtype=torch.bfloat16, device="cuda"), out[:, :2048].clone()
    norm, activate = modules[NORM].norm, modules[ACTIVATION].act_and_mul
    return {
        "RMS norm": lambda: norm(out, x, w, 1e-6, False),
        "RMS norm, programmatic launch": lambda: norm(out, x, w, 1e-6, True),
        "SiLU and product": lambda: activate(half, x, False),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=200, help="calls per round")
    parser.add_argument("--limit", type=float, help="exit with 1 if NVRTC's path takes more times")
    args = parser.parse_args()
    if complaint := gpu_complaint():
        parser.error(complaint)
    with tempfile.TemporaryDirectory(prefix="flashinfer-paths-") as folder:
        old, new = (calls(build(compiler, Path(folder))) for compiler in COMPILERS)
        both = [call for name in old for call in (old[name], new[name])]
        for call in both:
            call()
        times = queued_us(both, args.rounds, args.calls)
    rows = [(name, a, b, b / a) for name, a, b in zip(old, times[::2], times[1::2], strict=True)]
    print(torch.cuda.get_device_name())
    headers = ("call", "nvcc (µs)", "NVRTC (µs)", "ratio")
    print(tabulate(rows, headers, floatfmt=".3f"))
    return 1 if args.limit is not None and max(row[3] for row in rows) > args.limit else 0


if __name__ == "__main__":
    sys.exit(main())
