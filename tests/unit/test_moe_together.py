"""The modules of a mixture compile side by side, each by itself."""

from __future__ import annotations

import threading

import pytest
import torch

from flashinfer._moe.together import build_together
from flashinfer.gemm._choice import GemmProblem
from flashinfer.jit import JitSpec, current_compilation_context

BF16 = torch.bfloat16


def _product(columns: int, k: int, activation: str) -> GemmProblem:
    return GemmProblem(
        *(BF16, BF16, BF16, 8, columns, k),
        batches=128,
        groups="offsets",
        activation=activation,
        gathers=activation != "identity",
        routed=True,
    )


def test_each_module_is_built_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    current_compilation_context.reset()
    built: list[str] = []
    all_begun = threading.Barrier(4, timeout=30)  # both products, map and sum

    def build(spec: JitSpec) -> None:
        all_begun.wait()
        built.append(spec.name)

    monkeypatch.setattr(JitSpec, "build", build)
    build_together.cache_clear()
    first, second = _product(1536, 2048, "swiglu"), _product(2048, 768, "identity")
    build_together(first, second, BF16, torch.int32)
    build_together.cache_clear()
    assert len(set(built)) == 4
