"""A short program that shows whether an installation works: ``python tests/smoke.py``.

It needs the installed package, its dependencies and nothing else: neither a GPU nor a compiler nor
pytest. The tests of packaging run it with other versions of Python and of the dependencies. Its
last line is JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = tempfile.mkdtemp(prefix="flashinfer-smoke-")
os.environ |= {
    "FLASHINFER_BACKEND": "reference",
    "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
    "FLASHINFER_WORKSPACE_BASE": FOLDER,
    "FLASHINFER_LOGLEVEL": "10",
    "FLASHINFER_LOGDEST": f"{FOLDER}/log",
    "FLASHINFER_DUMP_DIR": f"{FOLDER}/dumps",
}

import torch  # noqa: E402

import flashinfer  # noqa: E402


def check_norm() -> None:
    x, w = torch.randn(4, 64, dtype=torch.bfloat16), torch.rand(64).bfloat16()
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
    error = (flashinfer.rmsnorm(x, w).double() - expected).abs().max().item()
    assert error <= expected.abs().max().item() * 2**-8, error


def check_decode() -> None:
    """Decoding with pages of one key each is a softmax over the keys."""
    q, k = torch.randn(1, 2, 64), torch.randn(3, 1, 2, 64)
    v = torch.randn(3, 1, 2, 64)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    offsets, pages, last = ([0, 3], [2, 0, 1], [1])
    lists = [torch.tensor(values, dtype=torch.int32) for values in (offsets, pages, last)]
    types = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
    wrapper.plan(*lists, 2, 2, 64, 1, **types)
    half = [tensor.half() for tensor in (q, k, v)]
    out = wrapper.run(half[0], (half[1], half[2])).double()
    wide_q, wide_k, wide_v = (tensor.double() for tensor in half)
    scores = torch.einsum("hd,khd->hk", wide_q[0], wide_k[:, 0]) / 8
    expected = torch.einsum("hk,khd->hd", scores.softmax(-1), wide_v[:, 0])
    assert (out[0] - expected).abs().max().item() < 1e-2


def check_sampling() -> None:
    probs = torch.zeros(5, 7)
    probs[range(5), [3, 1, 6, 0, 2]] = 1
    assert flashinfer.sampling_from_probs(probs).tolist() == [3, 1, 6, 0, 2]


def check_command_line() -> None:
    """Every command that only looks, and the replay of the calls above."""
    command = [sys.executable, "-m", "flashinfer"]
    for words in ("version", "--help", "show-config", "list-modules", "module-status"):
        subprocess.run([*command, words], check=True, stdout=subprocess.DEVNULL)
    text = subprocess.run([*command, "collect-env", "--json"], check=True, capture_output=True)
    assert json.loads(text.stdout)["flashinfer"]["version"] == flashinfer.__version__
    replay = [*command, "replay", f"{FOLDER}/dumps", "--compare", "--device", "cpu"]
    out = subprocess.run(replay, capture_output=True, text=True)
    assert out.returncode == 0 and "same" in out.stdout, out.stdout + out.stderr


def compile_norm() -> str:
    """Compile a module for the device and the host, and load it."""
    from flashinfer.jit.norm import gen_norm_module

    if not shutil.which("nvcc"):
        return "no nvcc"
    spec = gen_norm_module()
    spec.build()
    assert callable(spec.load().norm)
    return "compiled and loaded"


def main() -> None:
    """Run all checks and print what they ran with."""
    try:
        checks = (check_norm, check_decode, check_sampling, check_command_line)
        for check in checks:
            check()
        dump = next(Path(FOLDER, "dumps").iterdir())
        report = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "flashinfer": flashinfer.__version__,
            "location": str(Path(flashinfer.__file__).parent),
            "checks": len(checks),
            "norm": compile_norm(),
            "dump_mode": oct(dump.stat().st_mode & 0o777),
            "safetensors": importlib.util.find_spec("safetensors") is not None,
        }
    finally:
        shutil.rmtree(FOLDER)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
