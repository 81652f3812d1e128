"""Modules that are built ahead of time are those that a server's plans choose."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._attention.plan import choice as backends
from flashinfer.jit import current_compilation_context, registry

HEADS = (32, 8, 128)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    current_compilation_context.reset()


def pages(batch_size: int, tokens: int) -> tuple[torch.Tensor, ...]:
    indptr = torch.arange(batch_size + 1, dtype=torch.int32) * (tokens // 16)
    return indptr, torch.arange(int(indptr[-1]), dtype=torch.int32), torch.full((batch_size,), 16)


def chosen(wrapper, *arguments, **options) -> str:
    """Name of the module that a plan needs."""
    with flashinfer.reference_backend():
        wrapper.plan(*arguments, q_data_type=torch.bfloat16, **options)
    return wrapper._executor.config.uri


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_decode_of_llama(kv_dtype: torch.dtype):
    names = {spec.name for spec in registry.preset_specs("llama-bf16")}
    workspace = torch.empty(1 << 24, dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    arguments = (*pages(4, 64), *HEADS, 16)
    assert chosen(wrapper, *arguments, kv_data_type=kv_dtype) in names


@pytest.mark.parametrize("on_hopper", [False, True])
@pytest.mark.parametrize("tokens", [15, 2048])
def test_prefill_of_llama(tokens: int, on_hopper: bool, monkeypatch: pytest.MonkeyPatch):
    """Short prompts have tiles of 64 rows, long ones of 128, of Hopper's kernel where it is."""
    monkeypatch.setattr(backends, "is_hopper", lambda device: on_hopper)
    names = {spec.name for spec in registry.preset_specs("llama-bf16")}
    workspace = torch.empty(1 << 24, dtype=torch.uint8)
    indptr = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
    arguments = (indptr, *pages(2, max(tokens, 16)), *HEADS, 16)
    assert chosen(paged, *arguments, causal=True) in names
    assert paged._executor.config.backend == ("fa3" if on_hopper and tokens > 15 else "fa2")
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    assert chosen(ragged, indptr, indptr, *HEADS, causal=True) in names
    assert "attention_plan" in names


@pytest.mark.parametrize("options", [{}, {"window_left": 4095}, {"logits_soft_cap": 50.0}])
@pytest.mark.parametrize("tokens", [2, 15, 2048])
def test_gemma(tokens: int, options: dict, monkeypatch: pytest.MonkeyPatch):
    """Heads of 256: decode, short prompts, and long ones on Hopper's kernel."""
    monkeypatch.setattr(backends, "is_hopper", lambda device: True)
    names = {spec.name for spec in registry.preset_specs("gemma")}
    workspace = torch.empty(1 << 24, dtype=torch.uint8)
    heads = (16, 8, 256, 16)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    assert chosen(decode, *pages(4, 64), *heads, **options) in names
    indptr = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32)
    prompt = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
    arguments = (indptr, *pages(2, max(tokens, 16)), *heads)
    assert chosen(prompt, *arguments, causal=True, **options) in names
    assert prompt._executor.config.backend == ("fa3" if tokens > 15 else "fa2")
