"""What is compiled ahead is what requests use, and what the demo names; a preset has it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.serve import checkpoint
from examples.serve.ahead import compile_all
from examples.serve.config import ModelConfig
from examples.serve.engine import Engine, SamplingParams, load
from examples.serve.modules import modules
from examples.serve.runner import Runner
from examples.serve.warmup import warm_up
from flashinfer._attention.plan.executor import AttentionExecutor
from flashinfer._common.kernels import KernelTable
from flashinfer.jit import JitSpec, current_compilation_context, registry
from flashinfer.jit.attention.plan import get_attention_plan_module

LLAMA = {**checkpoint.SMALL, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN = {
    **checkpoint.SMALL,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 1,
    "head_dim": 64,
}


class _Kernels:
    """In place of a compiled module: results, the first tensors, become zeros."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: [a.zero_() for a in arguments[:2] if isinstance(a, torch.Tensor)]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the modules that calls ask for from here on; the calls compute nothing."""
    names: set[str] = set()

    def load_module(spec: JitSpec) -> _Kernels:
        names.add(spec.name)
        return _Kernels()

    def plan(self: AttentionExecutor, problem: Any, options: Any, **_: Any):
        key = self._module_key(problem, None, options)
        names.update((key.config().uri, "attention_plan"))

    def kernel_of(table: KernelTable, key: Any) -> Any:
        return table._get_kernel(*(key if isinstance(key, tuple) else (key,)))

    get_attention_plan_module()  # the real one, which chooses kernels
    monkeypatch.setattr(JitSpec, "build_and_load", load_module)
    # Kernels are neither found nor kept in what outlives the test.
    monkeypatch.setattr(KernelTable, "__getitem__", kernel_of, raising=False)
    monkeypatch.setattr(AttentionExecutor, "plan", plan)
    monkeypatch.setattr(AttentionExecutor, "run", lambda *_, **__: None)
    monkeypatch.setattr(Runner, "backend", lambda self: contextlib.nullcontext())
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    current_compilation_context.reset()
    return names


@pytest.mark.parametrize(
    "config, kv_dtype", [(LLAMA, None), (QWEN, None), (QWEN, torch.float8_e4m3fn)]
)
def test_all_and_only_what_requests_use(
    tmp_path: Path, used: set[str], config: dict[str, Any], kv_dtype: torch.dtype | None
):
    folder = checkpoint.write_random_checkpoint(tmp_path, config)
    model, tokenizer = load(folder, "cpu", torch.float16)
    engine = Engine(model, tokenizer, num_pages=128, kv_dtype=kv_dtype)
    warm_up(engine, 4)
    for number in range(4):  # a short prompt among requests that decode
        engine.add_request(str(number), [number] * 3, SamplingParams(max_tokens=4))
        engine.step()
    named = modules(model.config, torch.float16, kv_dtype or torch.float16)
    # Without a GPU no plan takes the kernel for Hopper.
    expected = {spec.name for spec in named if not spec.name.endswith("_fa3")}
    assert used == expected
    used.clear()
    compilation = compile_all(model, 16, kv_dtype or torch.float16, False)
    compilation.wait_for_prompt()
    assert used and all(future.done() for future in compilation.prompt)
    compilation.wait()
    assert used == expected and compilation.is_done


@pytest.mark.parametrize("arch, count", [("9.0a", 1), ("8.0", 0)])
def test_the_kernel_for_hopper(monkeypatch: pytest.MonkeyPatch, arch: str, count: int):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", arch)
    current_compilation_context.reset()
    config, bf16 = ModelConfig.from_dict(LLAMA), torch.bfloat16
    for kv_dtype in (bf16, torch.float8_e4m3fn):
        names = [spec.name for spec in modules(config, bf16, kv_dtype)]
        assert sum(name.endswith("_fa3") for name in names) == count


def test_the_preset_has_what_llama_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    current_compilation_context.reset()
    built = {spec.name for spec in registry.preset_specs("llama-bf16")}
    for config in (LLAMA, checkpoint.SMALL):
        named = modules(ModelConfig.from_dict(config), torch.bfloat16, torch.bfloat16)
        assert {spec.name for spec in named} <= built
