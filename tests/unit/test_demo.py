"""The demo on a machine without a GPU: compiles for real, and says what it did not do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.compiler
def test_demo_without_a_gpu():
    keep = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    result = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        env=keep | {"CUDA_VISIBLE_DEVICES": "-1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    out = result.stdout
    assert result.returncode == 0, result.stderr
    assert "Compiling for sm_90a" in out and "NO GPU WAS USED" in out
    for call in ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul"):
        assert re.search(rf"\] {call} +\d+\.\d s$", out, flags=re.M)
        kernels = re.findall(rf"^{call} +\w+_kernel +(\w+) +(\d+) +(\w+)", out, flags=re.M)
        assert kernels
        for arch, registers, spills in kernels:
            assert arch == "sm_90a" and 16 <= int(registers) <= 255 and spills == "none"
        # Rounding a correct result to bfloat16 costs at most half a unit in the last place.
        error = re.search(rf"^{call} +(\d\.\d\d)$", out, flags=re.M)
        assert error and float(error[1]) <= 0.51
