"""The kernel that streams 4-bit weights: no warnings, and no stack for any tile."""

from __future__ import annotations

import pytest
import torch
from strict_build import strict_build as strict_build

from flashinfer.jit.binary import read_kernels
from flashinfer.jit.weight_gemm import WeightGemmConfig, gen_weight_gemm_module

pytestmark = pytest.mark.compiler

BF16 = torch.bfloat16
FORMATS = [
    ("int4", BF16, 128),
    ("int4", torch.float32, 128),
    ("int4", BF16, 0),
    ("mxfp4", torch.uint8, 32),
    ("nvfp4", torch.float8_e4m3fn, 16),
]
# Tokens, warps, parts of k and columns: what `_choose_stream_shape` takes, the largest first.
TILES = [
    (16, 16, 1, 32),
    (8, 8, 1, 32),
    (16, 16, 1, 64),
    (16, 8, 1, 64),
    (8, 8, 1, 64),
    (16, 8, 1, 128),
    (8, 8, 1, 128),
    (16, 16, 2, 32),
    (8, 8, 2, 32),
    (16, 8, 1, 0),
    (8, 8, 1, 0),
]
CASES = [(*weights, *tile) for tile in TILES for weights in FORMATS]
# The others run under --full only.
PARAMETERS = [
    pytest.param(*case, marks=pytest.mark.full if i else ()) for i, case in enumerate(CASES)
]


@pytest.mark.parametrize(
    ("weights", "dtype_scale", "group", "tokens", "warps", "splits", "columns"), PARAMETERS
)
def test_tiles_take_no_stack(
    weights: str,
    dtype_scale: torch.dtype,
    group: int,
    tokens: int,
    warps: int,
    splits: int,
    columns: int,
    strict_build: pytest.MonkeyPatch,
) -> None:
    strict_build.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    common = (BF16, BF16, weights, dtype_scale, group, tokens, warps, splits)
    spec = gen_weight_gemm_module(WeightGemmConfig(*common, streams=True, columns=columns))
    spec.build()
    (kernel,) = read_kernels(spec.get_library_path())
    # tests/unit/strict_build.py says why.
    assert kernel.stack_bytes <= (8 if tokens == 16 and splits == 2 else 0)
