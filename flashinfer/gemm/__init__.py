"""Matrix products: 16 and 8 bits, with scales, in batches, in groups and in segments."""

from .._common.cuda_tile import is_cuda_tile_available as is_cuda_tile_available
from ..jit.gemm import gen_gemm_module as gen_gemm_module
from ..jit.gemm import gen_gemm_sm90_module as gen_gemm_sm90_module
from .batched import bmm_fp8 as bmm_fp8
from .block_scaled import fp8_blockscale_gemm_sm90 as fp8_blockscale_gemm_sm90
from .block_scaled import fp8_blockscale_gemm_swiglu_sm90 as fp8_blockscale_gemm_swiglu_sm90
from .dense import bmm_bf16 as bmm_bf16
from .dense import mm_bf16 as mm_bf16
from .dense import tinygemm_bf16 as tinygemm_bf16
from .few import mm_add_rmsnorm_bf16 as mm_add_rmsnorm_bf16
from .few import mm_silu_and_mul_bf16 as mm_silu_and_mul_bf16
from .fp8 import fp8_linear as fp8_linear
from .fp8 import grouped_mm_fp8 as grouped_mm_fp8
from .fp8 import mm_fp8 as mm_fp8
from .groupwise import batch_deepgemm_fp8_nt_groupwise as batch_deepgemm_fp8_nt_groupwise
from .groupwise import gemm_fp8_nt_blockscaled as gemm_fp8_nt_blockscaled
from .groupwise import gemm_fp8_nt_groupwise as gemm_fp8_nt_groupwise
from .groupwise import group_deepgemm_fp8_nt_groupwise as group_deepgemm_fp8_nt_groupwise
from .groupwise import group_gemm_fp8_nt_groupwise as group_gemm_fp8_nt_groupwise
from .groupwise import (
    group_gemm_fp8_nt_groupwise_contiguous as group_gemm_fp8_nt_groupwise_contiguous,
)
from .normed import add_rmsnorm_mm_bf16 as add_rmsnorm_mm_bf16
from .normed_heads import add_rmsnorm_mm_rope_append_bf16 as add_rmsnorm_mm_rope_append_bf16
from .normed_route import add_rmsnorm_mm_route_bf16 as add_rmsnorm_mm_route_bf16
from .prepared import PreparedBatchDeepGemmFp8NtGroupwise as PreparedBatchDeepGemmFp8NtGroupwise
from .prepared import (
    PreparedGroupGemmFp8NtGroupwiseContiguous as PreparedGroupGemmFp8NtGroupwiseContiguous,
)
from .prepared import (
    PreparedGroupGemmFp8NtGroupwiseContiguousSiluQuant as PreparedGroupGemmFp8NtGroupwiseContiguousSiluQuant,  # noqa: E501
)
from .prepared import (
    prepare_batch_deepgemm_fp8_nt_groupwise as prepare_batch_deepgemm_fp8_nt_groupwise,
)
from .prepared import (
    prepare_group_gemm_fp8_nt_groupwise_contiguous as prepare_group_gemm_fp8_nt_groupwise_contiguous,  # noqa: E501
)
from .prepared import (
    prepare_group_gemm_fp8_nt_groupwise_contiguous_silu_quant as prepare_group_gemm_fp8_nt_groupwise_contiguous_silu_quant,  # noqa: E501
)
from .router import mm_M1_16_K6144_N256 as mm_M1_16_K6144_N256
from .router import mm_M1_16_K7168_N128 as mm_M1_16_K7168_N128
from .router import mm_M1_16_K7168_N256 as mm_M1_16_K7168_N256
from .router import mm_M1_16_K7168_N256_bf16 as mm_M1_16_K7168_N256_bf16
from .router import mm_M1_16_K7168_N384 as mm_M1_16_K7168_N384
from .router import mm_M1_16_K7168_N384_bf16 as mm_M1_16_K7168_N384_bf16
from .router import mm_M1_16_K7168_N896 as mm_M1_16_K7168_N896
from .router import mm_M1_16_K7168_N896_bf16 as mm_M1_16_K7168_N896_bf16
from .segments import SegmentGEMMWrapper as SegmentGEMMWrapper
from .segments import grouped_mm_bf16 as grouped_mm_bf16
from .weight_only import weight_only_linear as weight_only_linear
