"""Mixtures under the tuner, on the CPU: kernels that compute nothing, and a clock that is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashinfer import autotuner as at
from flashinfer._moe import experts as experts_module
from flashinfer._moe import tuning as mixtures
from flashinfer._moe.experts import Experts
from flashinfer.autotuner.context import autotune
from flashinfer.gemm import _launch
from flashinfer.gemm._choice import GemmProblem
from flashinfer.jit.gemm import GemmConfig

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TENSORS = {
    "none": (),
    "block": (torch.ones(8, 4, 2), torch.ones(8, 2, 2)),
    "tensor": (torch.ones(8), torch.ones(1), torch.ones(8)),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GemmConfig]]:
    """The tiles of all launches; each candidate is a little faster than the one before it."""
    configs: list[GemmConfig] = []
    now = 1.0

    def clock(call: Any, samples: int, replays: int) -> list[float]:
        nonlocal now
        call()
        now *= 0.97
        return [now] * samples

    tuner = at.AutoTuner(warmup=0, repeat=1, timer=clock)
    monkeypatch.setattr(at.AutoTuner, "_instance", tuner)
    monkeypatch.setattr(
        _launch, "get_gemm_kernel", lambda config: lambda *arguments: configs.append(config)
    )
    monkeypatch.setattr(_launch.checks, "cuda_tensors", lambda **tensors: None)
    monkeypatch.setattr("flashinfer.autotuner.candidates.build_jit_specs", lambda specs: None)
    for name in ("map_rows", "combine"):
        monkeypatch.setattr(experts_module, name, lambda *arguments, **options: None)
    monkeypatch.setattr(experts_module, "quantize_rows", lambda x, name, out, enable_pdl: out)
    tuner.clear_cache()
    yield configs
    _launch._kernels.clear()


@pytest.mark.parametrize("scheme", TENSORS)
def test_both_products_are_tuned(scheme: str, launched: list[GemmConfig]) -> None:
    """Eight of 32 experts are here; five tokens choose six."""
    dtype = BF16 if scheme == "none" else E4M3
    fc1, fc2 = torch.zeros(8, 512, 256).to(dtype), torch.zeros(8, 256, 256).to(dtype)
    layer = Experts(
        fc1, fc2, "swiglu_gate_last", scheme, TENSORS[scheme], first_expert=8, all_experts=32
    )
    x = torch.zeros(5, 256).to(E4M3 if scheme == "tensor" else BF16)
    chosen, weights = torch.zeros(5, 6, dtype=torch.int64), torch.ones(5, 6)
    out = torch.zeros(5, 256, dtype=BF16)

    def run() -> list[GemmConfig]:
        launched.clear()
        layer.run(x, chosen, weights, out)
        return list(launched)

    usual = run()
    with autotune():
        won = run()[-2:]
        assert run() == won, "a second call measures nothing"
    assert run() == won and len(usual) == 2
    assert won[0] != usual[0] and won[1] != usual[1]
    assert [config.gathers for config in won] == [True, False]
    keys = [key.split(" | ") for key in at.AutoTuner.get()._results]
    # 1, 2, 4 and 8 tokens have 1, 3, 6 and 12 rows here, on average.
    for number, columns in ((1, 512), (2, 256)):
        shapes = [key[2] for key in keys if key[0] == f"trtllm::fused_moe::gemm{number}"]
        assert shapes == [f"(({rows}, {columns}, 256),)" for rows in (1, 4, 8, 16)]


def test_batches_of_a_mixture(launched: list[GemmConfig]) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def compute(x: torch.Tensor, chosen: torch.Tensor, *_: torch.Tensor) -> None:
        seen.append((x, chosen))

    x, chosen = torch.randn(5, 64), torch.zeros(5, 4, dtype=torch.int32)
    compiled: list[int] = []

    def products(tokens: int) -> list[GemmProblem]:
        compiled.append(tokens)
        return []

    arguments = ("kind", compute, products, x, chosen, torch.zeros(5, 64), 32, 8192)
    mixtures.compute_batches(*arguments)
    assert not seen, "nothing is tuned"
    with autotune():
        mixtures.compute_batches(*arguments)
        assert [len(tokens) for tokens, _ in seen] == [1, 2, 4, 8] == compiled
        mixtures.compute_batches(*arguments)
        assert len(seen) == 4
    for tokens, drawn in seen:
        assert drawn.shape == (len(tokens), 4) and drawn.dtype == torch.int32
        assert all(len(set(row)) == 4 for row in drawn.tolist())
        assert torch.equal(tokens, x[torch.arange(len(tokens)) % 5])
    assert len(set(seen[-1][1].flatten().tolist())) > 8, "equal tokens do not share experts"
    seen.clear()
    with autotune(tuning_buckets=(3, 16)):
        mixtures.compute_batches(*arguments)
    assert [len(tokens) for tokens, _ in seen] == [3, 16]
    assert mixtures.sizes_of_batches(100, 64) == (1, 2, 4, 8, 16, 32, 64)
    with autotune(skip_ops={"trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"}):
        mixtures.compute_batches(*arguments)
    assert len(seen) == 2
