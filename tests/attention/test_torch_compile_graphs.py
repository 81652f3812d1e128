"""CUDA graphs in ``torch.compile(mode="reduce-overhead")``: replays give what eager calls give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def replayed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call compiled with CUDA graphs; the third call and later ones are replays."""
    return torch.compile(call, fullgraph=True, mode="reduce-overhead")


def same_for_new_values(call: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
    compiled = replayed(call)
    for _ in range(5):
        tensors = [torch.randn(shape, dtype=torch.float16, device="cuda") for shape in shapes]
        torch.compiler.cudagraph_mark_step_begin()
        actual = compiled(*tensors).clone()
        torch.testing.assert_close(actual, call(*tensors), rtol=1e-3, atol=1e-3)


def test_norms_and_activations():
    weight = torch.ones(256, dtype=torch.float16, device="cuda")

    def block(x: torch.Tensor) -> torch.Tensor:
        normed = flashinfer.rmsnorm(x * 2, weight)
        return flashinfer.silu_and_mul(torch.cat([normed, x], -1))

    same_for_new_values(block, (8, 256))


@pytest.mark.parametrize("kv_len", [31, 1024])
def test_single_decode(kv_len: int):
    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashinfer.single_decode_with_kv_cache(q, k, v) * 2

    same_for_new_values(decode, (32, 128), (kv_len, 8, 128), (kv_len, 8, 128))


@pytest.mark.parametrize("causal", [False, True])
def test_single_prefill(causal: bool):
    def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashinfer.single_prefill_with_kv_cache(q, k, v, causal=causal) * 2

    same_for_new_values(prefill, (100, 32, 128), (200, 8, 128), (200, 8, 128))


def _indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_a_plan_between_replays_takes_effect(use_cuda_graph: bool):
    buffers = {
        "paged_kv_indptr_buffer": _indices(0, 0, 0),
        "paged_kv_indices_buffer": _indices(*[0] * 16),
        "paged_kv_last_page_len_buffer": _indices(0, 0),
    }
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda"),
        use_cuda_graph=use_cuda_graph,
        **(buffers if use_cuda_graph else {}),
    )
    cache = torch.randn(16, 2, 16, 8, 128, dtype=torch.float16, device="cuda")
    step = replayed(lambda q: wrapper.run(q, cache) * 2)
    for pages, last in (((0, 1, 2), 3), ((5, 6, 7), 16), ((9, 8, 15), 1), ((2, 2, 3), 9)):
        tables = (_indices(0, 1, 3), _indices(*pages), _indices(last, last))
        wrapper.plan(*tables, 32, 8, 128, 16, q_data_type=torch.float16)
        q = torch.randn(2, 32, 128, dtype=torch.float16, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        actual = step(q).clone()
        torch.testing.assert_close(actual, wrapper.run(q, cache) * 2, rtol=1e-3, atol=1e-3)


def test_each_replay_draws_anew():
    probs = torch.full((64, 1000), 1e-3, device="cuda")
    draw = replayed(lambda probs: flashinfer.sampling.sampling_from_probs(probs) + 0)
    draws = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        draws.append(draw(probs).clone())
    assert not any(torch.equal(a, b) for a, b in zip(draws, draws[1:], strict=False))
