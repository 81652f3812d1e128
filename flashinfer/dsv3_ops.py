"""Operations of DeepSeek V3 and its relatives, by the path that engines import."""

from .fused_moe.routing import fused_topk_deepseek as fused_topk_deepseek
from .gemm.router import mm_M1_16_K6144_N256 as mm_M1_16_K6144_N256
from .gemm.router import mm_M1_16_K7168_N128 as mm_M1_16_K7168_N128
from .gemm.router import mm_M1_16_K7168_N256 as mm_M1_16_K7168_N256
from .gemm.router import mm_M1_16_K7168_N256_bf16 as mm_M1_16_K7168_N256_bf16
from .gemm.router import mm_M1_16_K7168_N384 as mm_M1_16_K7168_N384
from .gemm.router import mm_M1_16_K7168_N384_bf16 as mm_M1_16_K7168_N384_bf16
from .gemm.router import mm_M1_16_K7168_N896 as mm_M1_16_K7168_N896
from .gemm.router import mm_M1_16_K7168_N896_bf16 as mm_M1_16_K7168_N896_bf16
