"""Matrix products of 8-bit operands with scales."""

from .batched import bmm_fp8 as bmm_fp8
from .block_scaled import fp8_blockscale_gemm_sm90 as fp8_blockscale_gemm_sm90
