"""Quantisation of activations and of weights: group and block scales, bit packing."""

from .._common.packbits import gen_quantization_module as gen_quantization_module
from .._common.packbits import packbits as packbits
from .._common.packbits import segment_packbits as segment_packbits
from ..tllm_enums import SfLayout as SfLayout
from .dequantize import e2m1_and_ufp8sf_scale_to_float as e2m1_and_ufp8sf_scale_to_float
from .dequantize import mxfp4_dequantize as mxfp4_dequantize
from .dequantize import mxfp4_dequantize_host as mxfp4_dequantize_host
from .fp4 import fp4_quantize as fp4_quantize
from .fp4 import get_fp4_quantization_module as get_fp4_quantization_module
from .fp4 import mxfp4_quantize as mxfp4_quantize
from .fp4 import nvfp4_quantize as nvfp4_quantize
from .fp4 import silu_and_mul_nvfp4_quantize as silu_and_mul_nvfp4_quantize
from .fp8 import mxfp8_dequantize_host as mxfp8_dequantize_host
from .fp8 import mxfp8_quantize as mxfp8_quantize
from .fp8 import per_token_group_quant_8bit as per_token_group_quant_8bit
from .fp8 import (
    silu_and_mul_per_token_group_quant_8bit as silu_and_mul_per_token_group_quant_8bit,
)
from .grouped import mxfp8_grouped_quantize as mxfp8_grouped_quantize
from .grouped import nvfp4_batched_quantize as nvfp4_batched_quantize
from .grouped import scaled_fp4_grouped_quantize as scaled_fp4_grouped_quantize
from .grouped import (
    silu_and_mul_scaled_nvfp4_experts_quantize as silu_and_mul_scaled_nvfp4_experts_quantize,
)
from .kv_cache import nvfp4_kv_dequantize as nvfp4_kv_dequantize
from .kv_cache import nvfp4_kv_dequantize_paged as nvfp4_kv_dequantize_paged
from .kv_cache import nvfp4_kv_quantize as nvfp4_kv_quantize
from .kv_cache import nvfp4_quantize_paged_kv_cache as nvfp4_quantize_paged_kv_cache
from .layout import block_scale_interleave as block_scale_interleave
from .layout import nvfp4_block_scale_interleave as nvfp4_block_scale_interleave
from .nvfp4_quantization_utils import make_nvfp4_global_scale as make_nvfp4_global_scale
from .nvfp4_quantization_utils import nvfp4_e4m3_max as nvfp4_e4m3_max
from .shuffle import shuffle_matrix_a as shuffle_matrix_a
from .shuffle import shuffle_matrix_sf_a as shuffle_matrix_sf_a
