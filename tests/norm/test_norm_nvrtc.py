"""Kernels of three families, compiled with NVRTC and launched through the driver, give results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "norm_dtype_bf16_out_dtype_bf16_subtract_mean_0_add_residual_0",
    "act_and_mul_activation_silu_dtype_bf16",
    "page",
)
CALLS = """
import json, pathlib, sys
import torch, flashinfer

def close(found, expected, bound):
    error = (found.double() - expected).abs().max().item()
    assert error <= bound * expected.abs().max().item(), error

torch.manual_seed(0)
x, w = torch.randn(9, 4096).bfloat16().cuda(), torch.rand(4096).bfloat16().cuda()
wide = x.double()
normed = lambda: wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
close(flashinfer.rmsnorm(x, w), normed(), 2**-8)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = flashinfer.rmsnorm(x, w)
x.copy_(torch.randn(9, 4096))
wide = x.double()
graph.replay()
close(captured, normed(), 2**-8)
gate, up = wide.chunk(2, dim=-1)
close(flashinfer.silu_and_mul(x), gate * gate.sigmoid() * up, 2**-8)
lengths = torch.tensor([5, 0, 3], dtype=torch.int32, device="cuda")
offsets = torch.tensor([0, 4, 4, 6], dtype=torch.int32, device="cuda")
batch, positions = flashinfer.get_batch_indices_positions(offsets, lengths, 6)
assert batch.tolist() == [0, 0, 0, 0, 2, 2] and positions.tolist() == [1, 2, 3, 4, 1, 2]

manifests = [json.loads(p.read_text()) for p in pathlib.Path(sys.argv[1]).rglob("manifest.json")]
compilers = [m["ingredients"]["toolchain"] for m in manifests]
assert len(compilers) == 3 and all("nvrtc" in c for c in compilers), compilers
print("done")
"""


@pytest.mark.gpu
@pytest.mark.compiler
def test_three_families_through_nvrtc(tmp_path: Path):
    """In processes of their own: the environment decides who compiles."""
    from flashinfer.jit import nvrtc

    if nvrtc.library() is None:
        pytest.skip("needs libnvrtc: pip install nvidia-cuda-nvrtc")
    keep = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "cache"),
        "FLASHINFER_HOST_DIR": str(tmp_path / "host"),
        "FLASHINFER_COMPILER": "nvrtc",
    }
    build = ["-m", "flashinfer", "build-host-parts", str(tmp_path / "host"), *MODULES]
    for words in (build, ["-c", CALLS, str(tmp_path / "cache")]):
        done = subprocess.run(
            [sys.executable, *words], env=keep | own, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
