"""Bad calls of latent attention are refused by name, on a machine without GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.jit.attention.mla import MlaConfig, MlaPlanner, get_mla_module_of
from flashinfer.mla import one_call_launch, trtllm_batch_decode_with_kv_cache_mla

BF16 = torch.bfloat16
TOKENS, PAGES, PAGE, RANK, ROPE = 2, 4, 64, 512, 64
Arguments = dict[str, Any]


@pytest.fixture
def run(bindings_on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The binding of the portable kernel, with a plan of two requests of one query token."""
    module = get_mla_module_of.__wrapped__(MlaConfig("fa2", BF16, BF16, BF16, RANK, ROPE, BF16))
    ints = torch.zeros(8 << 20, dtype=torch.uint8)
    starts, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([9, 64]).int()

    def call(*, heads: int = 16, sm_scale: float = 0.1, **changes: Any) -> None:
        planner = MlaPlanner()
        planner.make(ints, 1 << 40, starts, starts, lengths, heads, RANK, PAGE, False)
        cache = torch.zeros(PAGES, PAGE, RANK + ROPE, dtype=BF16)
        a: Arguments = {
            "q_nope": torch.zeros(TOKENS, heads, RANK, dtype=BF16),
            "q_pe": torch.zeros(TOKENS, heads, ROPE, dtype=BF16),
            "ckv": cache[..., :RANK],
            "kpe": cache[..., RANK:],
            "indices": torch.zeros(2, dtype=torch.int32),
            "out": torch.zeros(TOKENS, heads, RANK, dtype=BF16),
            "lse": torch.zeros(TOKENS, heads),
            "sinks": torch.zeros(heads),
        }
        a |= {name: change(a) for name, change in changes.items()}
        module.mla_run(
            planner.plan,
            (ints, torch.zeros(8 << 20)),
            (a["q_nope"], a["q_pe"]),
            (a["ckv"], a["kpe"], a["indices"]),
            *(a["out"], a["lse"], a["sinks"]),
            (sm_scale, 1.0, 1.0, 1.0),
            *(None, False),
        )

    return call


pytestmark = pytest.mark.compiler  # bindings are compiled, by the host's compiler


def _floats(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """The first elements of a contiguous tensor as float32."""
    return tensor.view(-1).view(torch.float32)[: shape[0] * shape[1]].view(shape)


def test_the_usual_call_needs_a_gpu(run: Callable[..., None]):
    with pytest.raises(ValueError, match="CUDA"):
        run()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"out": lambda a: a["q_nope"]}, "`out` must not share memory with `q_nope`"),
        (
            {"out": lambda a: a["ckv"].as_strided((2, 16, RANK), (16 * 576, 576, 1))},
            "`out` must not share memory with `ckv_cache`",
        ),
        (
            {"lse": lambda a: _floats(a["q_nope"], TOKENS, 16)},
            "`lse` must not share memory with `q_nope`",
        ),
        ({"lse": lambda a: _floats(a["out"], TOKENS, 16)}, "`lse` must not share memory"),
        ({"lse": lambda a: torch.zeros(TOKENS, 32)[:, ::2]}, "`lse` must be contiguous"),
        ({"lse": lambda a: torch.zeros(1, 16).expand(TOKENS, 16)}, "`lse` must be contiguous"),
        ({"heads": 1, "lse": lambda a: torch.zeros(TOKENS, 8)[:, :1]}, "`lse` must be contiguous"),
        ({"sm_scale": 1e39}, "`sm_scale` must be positive and finite in float32"),
        ({"sm_scale": 0.0}, "`sm_scale` must be positive"),
    ],
)
def test_the_binding_refuses(run: Callable[..., None], changes: Arguments, match: str):
    with pytest.raises(ValueError, match=match):
        run(**changes)


def _one_call(**changes: Any) -> Arguments:
    call: Arguments = {
        "query": torch.zeros(2, 1, 16, RANK + ROPE, dtype=BF16),
        "kv_cache": torch.zeros(PAGES, PAGE, RANK + ROPE, dtype=BF16),
        "workspace_buffer": torch.zeros(32 << 20, dtype=torch.uint8),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([9, 64], dtype=torch.int32),
        "max_seq_len": 64,
        "bmm1_scale": 0.1,
    }
    return call | changes


def test_counters_and_names_of_other_backends_are_taken():
    options = {"multi_ctas_kv_counter_buffer": torch.zeros(4, dtype=torch.uint8)}
    for backend in ("xqa", "trtllm-gen"):
        with flashinfer.reference_backend():
            call = _one_call(backend=backend, **options)
            assert trtllm_batch_decode_with_kv_cache_mla(**call).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_tables": None}, "`block_tables` must be a torch.Tensor, got NoneType"),
        ({"block_tables": [[0]]}, "`block_tables` must be a torch.Tensor, got list"),
        ({"query": torch.zeros(2, 1, 0, 576, dtype=BF16)}, "`query` must have a head"),
        ({"bmm1_scale": 1e39}, "`bmm1_scale` must be positive and finite in float32"),
        ({"bmm1_scale": 1e-50}, "`bmm1_scale` must be positive and finite in float32"),
        ({"multi_ctas_kv_counter_buffer": 3}, "`multi_ctas_kv_counter_buffer`"),
        ({"backend": "cutlass"}, "`backend`"),
    ],
)
def test_one_call_refuses(changes: Arguments, match: str):
    reference = flashinfer.reference_backend()
    with reference, pytest.raises((TypeError, ValueError), match=match):
        trtllm_batch_decode_with_kv_cache_mla(**_one_call(**changes))


def test_one_call_says_the_names_of_its_arguments(monkeypatch: pytest.MonkeyPatch):
    """The wrapper and the kernel, which it calls, have other names for them."""

    def refuse(*_: Any) -> None:
        raise ValueError("`q_nope` must have its rows at multiples of 16 bytes, not `ckv_cache`")

    monkeypatch.setattr(one_call_launch.OneCall, "_run_planned_here", refuse)
    with pytest.raises(ValueError, match="`query` must have its rows .* not `kv_cache`"):
        trtllm_batch_decode_with_kv_cache_mla(**_one_call())
