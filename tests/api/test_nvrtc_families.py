"""Kernels of every kind, compiled with NVRTC and launched by the driver, give results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.api.nvrtc_calls import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
BY_DEFAULT = ("norms_and_activations", "decode", "products", "chunks")


@pytest.mark.gpu
@pytest.mark.compiler
def test_families_through_nvrtc(tmp_path: Path, full: bool):
    """Each in a process and a cache of its own: an error of one spoils no other."""
    from flashinfer.jit import nvrtc

    if nvrtc.library() is None:
        pytest.skip("needs libnvrtc: pip install nvidia-cuda-nvrtc")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("some of the modules are for Hopper")
    keep = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "cache"),
        "FLASHINFER_HOST_DIR": str(tmp_path / "host"),
        "FLASHINFER_COMPILER": "nvrtc",
    }
    families = FAMILIES if full else BY_DEFAULT
    modules = sorted({name for family in families for name in FAMILIES[family][1]})
    build = [sys.executable, "-m", "flashinfer", "build-host-parts", str(tmp_path / "host")]
    done = subprocess.run(
        [*build, *modules], env=keep | own, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    call = [sys.executable, "-m", "tests.api.nvrtc_calls"]
    running = {
        family: subprocess.Popen(
            [*call, family, str(tmp_path / family)],
            env=keep | own | {"FLASHINFER_WORKSPACE_BASE": str(tmp_path / family)},
            cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for family in families
    }  # fmt: skip
    try:
        said = {family: process.communicate(timeout=240)[0] for family, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    wrong = [family for family, process in running.items() if process.returncode != 0]
    # The first line is what a summary of many tests shows.
    last = [said[family].strip().splitlines()[-1:] for family in wrong]
    assert not wrong, f"{last}\n" + "\n".join(said[family] for family in wrong)
