"""The demo on a machine without a GPU: compiles for real, checks, and says what it did not do."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch

from examples.serve import decode_step, demo, warmup
from examples.serve.checkpoint import LARGE
from examples.serve.config import ModelConfig
from examples.serve.engine import Engine
from examples.serve.shapes import random_model
from examples.serve.traces import make_trace
from flashinfer.jit import toolchain
from flashinfer.jit.errors import ToolchainError

ROOT = Path(__file__).resolve().parents[2]


# The demo with the first module of each kind, attention, norm, ..., of 18 modules.
ONE_OF_EACH = """
from examples.serve import demo
known = demo.compilable
demo.compilable = lambda specs: list(
    {spec.name.split("_")[0]: spec for spec in reversed(known(specs))}.values()
)
demo.main(prog_name="demo")
"""


def run(*options: str, program: tuple[str, str] = ("-m", "examples.serve.demo")):
    keep = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    return subprocess.run(
        [sys.executable, *program, *options],
        env=keep | {"CUDA_VISIBLE_DEVICES": "-1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.compiler
def test_demo_without_a_gpu(full: bool, tmp_path: Path):
    program = ("-m", "examples.serve.demo") if full else ("-c", ONE_OF_EACH)
    result = run("--json", str(tmp_path / "demo.json"), program=program)
    out = result.stdout
    assert result.returncode == 0, result.stderr
    assert "for sm_90a" in out and "NO GPU WAS USED" in out
    built = re.findall(r"\[ *\d+/(\d+)\] (\w+) +\d+\.\d s$", out, flags=re.M)
    assert len(built) == int(built[0][0]) and len(set(built)) == len(built)
    kernels = re.findall(r"^\d+ +(\w+_kernel) +\d+ +(\w+) +[\d-]*?(\d+) +(\w+)", out, flags=re.M)
    names = {name for name, *_ in kernels}
    assert {"attention_kernel", "norm_kernel", "rope_kernel", "append_kernel"} <= names
    assert {"act_and_mul_kernel", "top_k_kernel", "softmax_kernel"} <= names
    assert "sampling_kernel" in names or not full
    for _, arch, registers, spills in kernels:
        assert arch == "sm_90a" and 8 <= int(registers) <= 255
        assert spills == "none" or spills.isdigit()
    assert re.search(r"greedy tokens identical to \w+ .*: agrees$", out.strip())
    content = json.loads((tmp_path / "demo.json").read_text())
    assert set(content["compile_seconds"]) == {name for _, name in built}
    assert content["check"]["below"] <= content["check"]["allowed"]


def test_the_decode_step_needs_a_gpu():
    result = run("--decode-step")
    assert result.returncode == 2 and "--decode-step needs a GPU" in result.stderr
    result = run("--model-shape", "gpt-oss-20b")
    assert result.returncode == 2 and "--model-shape and --fp8-kv need a GPU" in result.stderr


def test_the_part_for_gpus_with_the_engine_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys):
    """Steps of the demo around the measurements of the GPU."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 199}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = ModelConfig.from_dict({**LARGE, **small, **heads, "max_position_embeddings": 4096})
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2_000_000_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 << 30, 80 << 30))
    monkeypatch.setattr(demo, "random_model", lambda config, device: random_model(config, "cpu"))
    without_graphs = {"use_cuda_graph": False}
    monkeypatch.setattr(demo, "Engine", lambda *args, **k: Engine(*args, **(k | without_graphs)))
    monkeypatch.setattr(demo, "make_trace", functools.partial(make_trace, scale=0.005))
    monkeypatch.setattr(demo, "OUTPUT_TOKENS", 3)
    monkeypatch.setattr(warmup, "PROMPTS", (2,))
    # What other tests have registered cannot be looked up without a GPU to compile for.
    monkeypatch.setattr(demo, "built_kernel_parts", lambda: {"norm_kernel": "norm"})
    monkeypatch.setattr(decode_step, "STEPS", 2)
    monkeypatch.setitem(decode_step.measure.__kwdefaults__, "record", lambda run: run() or [])
    results = demo.on_gpu(config, (2, 50.0), 2, (20, 120))
    out = capsys.readouterr().out
    assert "a GPU: 1 layers" in out and "From an empty JIT cache to the first token: " in out
    assert "ttft median ms" in out and "2 requests, 50/s" in out and "2.0 GB" in out
    assert "Decode step of 2 requests" in out and "profiler recorded no kernel" in out
    assert results["trace"]["finished"] == 2 and results["trace"]["pages_leaked"] == 0
    assert results["decode_step"]["batch_size"] == 2
    json.dumps(results, allow_nan=False)
    options = {"kv_dtype": torch.float8_e4m3fn}
    narrow = demo.on_gpu(config, None, 2, (20, 120), **options)["decode_step"]
    assert 2 * narrow["kv_bytes"] == results["decode_step"]["kv_bytes"]
    with pytest.raises(click.UsageError, match="lower --batch-size"):
        demo.on_gpu(config, None, 9999, (2048, 99999))


def test_without_tools_nvrtc_compiles_what_it_can(monkeypatch: pytest.MonkeyPatch, capsys):
    def missing() -> None:
        raise ToolchainError("no nvcc")

    served, other = (
        SimpleNamespace(host_part=functools.partial(str, part)) for part in ("part", "")
    )
    assert demo.compilable([served, other]) == [served, other]
    monkeypatch.setattr(toolchain, "require_toolkit", missing)
    assert demo.compilable([served, other]) == [served]
    assert "1 of 2 modules are left out" in capsys.readouterr().out
    with pytest.raises(ToolchainError):
        demo.compilable([other])
