"""The presets of mixtures have the modules that `cutlass_fused_moe` takes for their models."""

from __future__ import annotations

import pytest
import torch

from flashinfer._moe import four_bit
from flashinfer.gemm import _weight_kernels
from flashinfer.gemm._choice import GemmProblem, choose_config
from flashinfer.jit import registry
from flashinfer.jit.gemm import GemmConfig
from flashinfer.jit.weight_gemm import WeightGemmConfig

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def names_of(preset: str) -> set[str]:
    return {spec.name for spec in registry.preset_specs(preset)}


def products(
    experts: int, top_k: int, hidden: int, intermediate: int, code: torch.dtype, scale: str
) -> set[GemmConfig]:
    """The choice for both products of every batch."""
    chosen = set()
    for tokens in TOKENS:
        first = GemmProblem(
            code,
            code,
            code,
            rows=tokens * top_k,
            columns=2 * intermediate,
            k=hidden,
            batches=experts,
            routed=True,
            scale=scale,
            groups="offsets",
            activation="swiglu_gate_last",
            gathers=True,
        )
        second = GemmProblem(
            code,
            code,
            BF16,
            rows=tokens * top_k,
            columns=hidden,
            k=intermediate,
            batches=experts,
            routed=True,
            scale=scale,
            groups="offsets",
        )
        chosen |= {choose_config(first), choose_config(second)}
    return chosen


@pytest.mark.parametrize(
    ("preset", "shape", "code", "scale"),
    [
        ("qwen3-moe", (128, 8, 2048, 768), BF16, "none"),
        ("deepseek", (256, 8, 7168, 256), E4M3, "block"),
        ("deepseek", (256, 8, 7168, 2048), E4M3, "block"),
    ],
)
def test_products(
    preset: str, shape: tuple[int, int, int, int], code: torch.dtype, scale: str
) -> None:
    names = names_of(preset)
    assert {config.uri for config in products(*shape, code, scale)} <= names
    assert {"moe_map_index_int32", "moe_combine_dtype_bf16_dtype_out_bf16"} <= names


@pytest.mark.parametrize("experts", [32, 128])
def test_products_of_gpt_oss(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = {
        "get_shared_bytes_per_block_optin": 227 << 10,
        "get_compute_capability": (9, 0),
        "get_device_sm_count": 132,
    }
    for name, value in h200.items():
        monkeypatch.setattr(_weight_kernels, name, lambda device, value=value: value)
    names, choose = names_of("gpt-oss"), _weight_kernels.choose_weight_config.__wrapped__
    common = (torch.device("cpu"), BF16, BF16, "mxfp4", torch.uint8, 32)
    for tokens in TOKENS:
        rows, tiles = four_bit.rows_of_a_tile(4 * tokens, experts)
        for columns, activation in ((5760, "swiglu_gate_last"), (2880, "identity")):
            config: WeightGemmConfig = choose(*common, rows, columns, 2880, activation, tiles)
            assert config.uri in names, (tokens, columns)
