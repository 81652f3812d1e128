"""A list of the modules in CuTe-DSL that tests call, and a program that compiles them.

    python -m tests.cute_dsl_modules build/cute-dsl

fills a folder for `FLASHINFER_AOT_DIR` on a machine that has a GPU and not the DSL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flashinfer import aot
from flashinfer.jit import JitSpec, cute_dsl
from flashinfer.jit.cute_dsl_moe import (
    GEMM_TILES,
    CuteDslGroupedGemmConfig,
    CuteDslMoeActivationConfig,
    CuteDslMoeFinalizeConfig,
    gen_cute_dsl_grouped_gemm_module,
    gen_cute_dsl_moe_activation_module,
    gen_cute_dsl_moe_finalize_module,
)
from flashinfer.jit.cute_dsl_norm import CuteDslNormConfig, gen_cute_dsl_norm_module

BF16 = torch.bfloat16
DTYPES = (torch.float16, BF16, torch.float32)
# Heads, a lone row, two vectors a thread, an odd number of vectors, a cluster.
SHAPES = [(130, 128), (5, 32, 128), (1, 4096), (33, 1000), (7, 24576)]
QUANTISED = [
    (torch.float8_e4m3fn, (33, 4096)),
    (torch.float8_e4m3fn, (5, 4, 128)),
    (torch.float8_e5m2, (3, 7168)),
]


def config_of(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    hidden: int,
    *,
    subtract_mean: bool = False,
    add_residual: bool = False,
) -> CuteDslNormConfig:
    """The configuration of a case."""
    return CuteDslNormConfig(dtype, out_dtype, hidden, subtract_mean, add_residual)


def _configs() -> dict[CuteDslNormConfig, None]:
    found = []
    for dtype in DTYPES:
        for hidden in {shape[-1] for shape in SHAPES}:
            found += [
                config_of(dtype, dtype, hidden),
                config_of(dtype, dtype, hidden, add_residual=True),
                config_of(dtype, dtype, hidden, subtract_mean=True),
            ]
    for out_dtype, shape in QUANTISED:
        for add_residual in (False, True):
            found.append(config_of(BF16, out_dtype, shape[-1], add_residual=add_residual))
    return dict.fromkeys(found)


CONFIGS = _configs()
TOP_KS = (1, 2, 8)


def specs() -> list[JitSpec]:
    """Every module that the tests call."""
    found = list(map(gen_cute_dsl_norm_module, CONFIGS))
    for dtype in (torch.float16, BF16):
        found.append(gen_cute_dsl_moe_activation_module(CuteDslMoeActivationConfig(dtype)))
    for dtype in DTYPES:
        for tile in GEMM_TILES:
            gemm = CuteDslGroupedGemmConfig(dtype, *tile)
            found.append(gen_cute_dsl_grouped_gemm_module(gemm))
    for top_k in TOP_KS:
        for dtype_out in (BF16, torch.float32):
            finalize = CuteDslMoeFinalizeConfig(BF16, dtype_out, top_k)
            found.append(gen_cute_dsl_moe_finalize_module(finalize))
    return found


def need(device: torch.device, spec: JitSpec) -> None:
    """Skip a case on a GPU for which there is neither a compiled kernel nor a compiler."""
    assert spec.name in {known.name for known in specs()}, "what is compiled elsewhere has it"
    if device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("kernels in CuTe-DSL are written for compute capability 9.0")
    if cute_dsl.find() is None and spec.find() is None:
        pytest.skip("neither nvidia-cutlass-dsl nor the compiled module is here")


if __name__ == "__main__":
    aot.compile_and_package_modules(Path(sys.argv[1]), specs())
