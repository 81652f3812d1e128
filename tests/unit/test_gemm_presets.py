"""What is compiled ahead of time are the tiles that the choice takes."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gemm._choice import GemmProblem, all_configs
from flashinfer.jit import current_compilation_context, registry


def test_the_preset_of_8_bits_has_the_tiles_of_dense_products(monkeypatch: pytest.MonkeyPatch):
    """All of them, and no others: into bfloat16, and into codes of their SwiGLU."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    current_compilation_context.reset()
    code = torch.float8_e4m3fn
    problem = GemmProblem(code, code, torch.bfloat16, 1, 1, 1, scale="block")
    gated = GemmProblem(code, code, code, 1, 1, 1, scale="block", activation="swiglu_gate_last")
    wanted = {config.uri for each in (problem, gated) for config in all_configs(each)}
    names = {spec.name for spec in registry.preset_specs("fp8")}
    assert {name for name in names if name.startswith("gemm_")} == wanted
    assert names <= {spec.name for spec in registry.aot_specs()}
