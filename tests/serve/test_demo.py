"""The demo on a machine without a GPU: compiles for real, checks, and says what it did not do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*options: str) -> subprocess.CompletedProcess:
    keep = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    return subprocess.run(
        [sys.executable, "-m", "examples.serve.demo", *options],
        env=keep | {"CUDA_VISIBLE_DEVICES": "-1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.compiler
def test_demo_without_a_gpu(tmp_path: Path):
    result = run("--json", str(tmp_path / "demo.json"))
    out = result.stdout
    assert result.returncode == 0, result.stderr
    assert "for sm_90a" in out and "NO GPU WAS USED" in out
    built = re.findall(r"\[ *\d+/(\d+)\] (\w+) +\d+\.\d s$", out, flags=re.M)
    assert len(built) == int(built[0][0]) and len(set(built)) == len(built)
    kernels = re.findall(r"^\d+ +(\w+_kernel) +\d+ +(\w+) +[\d-]*?(\d+) +(\w+)", out, flags=re.M)
    names = {name for name, *_ in kernels}
    assert {"attention_kernel", "norm_kernel", "rope_kernel", "append_kernel"} <= names
    assert {"act_and_mul_kernel", "top_k_kernel", "sampling_kernel", "softmax_kernel"} <= names
    for _, arch, registers, spills in kernels:
        assert arch == "sm_90a" and 8 <= int(registers) <= 255
        assert spills == "none" or spills.isdigit()
    assert re.search(r"greedy tokens identical to \w+ .*: agrees$", out.strip())
    content = json.loads((tmp_path / "demo.json").read_text())
    assert set(content["compile_seconds"]) == {name for _, name in built}
    assert content["check"]["behind"] <= content["check"]["allowed"]


def test_the_decode_step_needs_a_gpu():
    result = run("--decode-step")
    assert result.returncode == 2 and "--decode-step needs a GPU" in result.stderr
