"""Matrix products: 16 and 8 bits, with scales, in batches, in groups and in segments."""

from .batched import bmm_fp8 as bmm_fp8
from .block_scaled import fp8_blockscale_gemm_sm90 as fp8_blockscale_gemm_sm90
from .dense import bmm_bf16 as bmm_bf16
from .dense import mm_bf16 as mm_bf16
from .dense import tinygemm_bf16 as tinygemm_bf16
from .groupwise import batch_deepgemm_fp8_nt_groupwise as batch_deepgemm_fp8_nt_groupwise
from .groupwise import gemm_fp8_nt_blockscaled as gemm_fp8_nt_blockscaled
from .groupwise import gemm_fp8_nt_groupwise as gemm_fp8_nt_groupwise
from .groupwise import group_deepgemm_fp8_nt_groupwise as group_deepgemm_fp8_nt_groupwise
from .groupwise import group_gemm_fp8_nt_groupwise as group_gemm_fp8_nt_groupwise
from .segments import SegmentGEMMWrapper as SegmentGEMMWrapper
from .segments import grouped_mm_bf16 as grouped_mm_bf16
