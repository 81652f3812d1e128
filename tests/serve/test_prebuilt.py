"""The example from prebuilt modules alone: what its engine looks up is shipped, and serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.serve import checkpoint
from examples.serve.config import ModelConfig
from examples.serve.modules import modules
from flashinfer.jit import current_compilation_context, registry

ROOT = Path(__file__).resolve().parents[2]
PRESET = "llama-bf16"
# Groups of 2, 4 and 8 query heads choose other tiles.
LARGER = {**checkpoint.LARGE, "hidden_size": 8192, "num_attention_heads": 64}
# The heads of Llama 3.2 1B: 64 elements.
SMALLER = {**checkpoint.LARGE, "hidden_size": 2048}
SHAPES = [checkpoint.SMALL, checkpoint.LARGE, LARGER]


def _check_the_wheel(config: dict, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    wheel = {spec.name for spec in registry.aot_specs()}
    needed = {spec.name for spec in modules(ModelConfig.from_dict(config), dtype, kv_dtype)}
    assert not needed - wheel
    assert any(name.endswith("_fa3") for name in needed)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    current_compilation_context.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", SHAPES)
def test_the_wheel_has_every_module_that_the_engine_looks_up(
    hopper: None, config: dict, dtype: torch.dtype
):
    for kv_dtype in (dtype, torch.float8_e4m3fn):
        _check_the_wheel(config, dtype, kv_dtype)


def test_the_wheel_has_heads_of_64(hopper: None):
    assert ModelConfig.from_dict(SMALLER).head_dim == 64
    _check_the_wheel(SMALLER, torch.bfloat16, torch.bfloat16)


def _python(
    folder: Path, *arguments: str, packages: Path | None = None, **env: str
) -> subprocess.CompletedProcess:
    """Run Python with this checkout, and `packages`, in a folder that has nothing of it."""
    given = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(packages or ""), str(ROOT), given)))
    everything = os.environ | {"PYTHONPATH": path} | env
    return subprocess.run(
        [sys.executable, *arguments], env=everything, cwd=folder, capture_output=True, text=True
    )


@pytest.mark.gpu
def test_the_example_serves_without_compiling(tmp_path: Path):
    """Modules lie as in the wheel's package; nothing else is cached, and no compiler is found."""
    package = tmp_path / "site" / "flashinfer_jit_cache"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    build = ("-m", "flashinfer.aot", "--preset", PRESET, "--out-dir", str(package / "jit_cache"))
    built = _python(tmp_path, *build)
    assert built.returncode == 0, built.stderr

    words = ("-m", "examples.serve", "generate", "Once upon a time", "--max-tokens", "8")
    settings = {
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "empty"),
        "FLASHINFER_DISABLE_JIT": "1",
        "PATH": "/nonexistent",
    }
    drawn = ("--temperature", "1", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01")
    for sampling in ((), (*drawn, "--seed", "1")):
        served = _python(tmp_path, *words, *sampling, packages=package.parent, **settings)
        assert served.returncode == 0, served.stderr
        assert served.stdout.strip()
    assert not list((tmp_path / "empty").rglob("*.so"))

    package.rename(tmp_path / "gone")
    refused = _python(tmp_path, *words, packages=package.parent, **settings)
    assert refused.returncode != 0 and "FLASHINFER_DISABLE_JIT" in refused.stderr
