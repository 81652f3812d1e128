"""Names of 4-bit quantisation under the module that FlashInfer has them in."""

from . import block_scale_interleave as block_scale_interleave
from . import e2m1_and_ufp8sf_scale_to_float as e2m1_and_ufp8sf_scale_to_float
from . import fp4_quantize as fp4_quantize
from . import get_fp4_quantization_module as get_fp4_quantization_module
from . import mxfp4_dequantize as mxfp4_dequantize
from . import mxfp4_dequantize_host as mxfp4_dequantize_host
from . import mxfp4_quantize as mxfp4_quantize
from . import nvfp4_batched_quantize as nvfp4_batched_quantize
from . import nvfp4_block_scale_interleave as nvfp4_block_scale_interleave
from . import nvfp4_kv_dequantize as nvfp4_kv_dequantize
from . import nvfp4_kv_dequantize_paged as nvfp4_kv_dequantize_paged
from . import nvfp4_kv_quantize as nvfp4_kv_quantize
from . import nvfp4_quantize as nvfp4_quantize
from . import nvfp4_quantize_paged_kv_cache as nvfp4_quantize_paged_kv_cache
from . import scaled_fp4_grouped_quantize as scaled_fp4_grouped_quantize
from . import shuffle_matrix_a as shuffle_matrix_a
from . import shuffle_matrix_sf_a as shuffle_matrix_sf_a
from . import silu_and_mul_nvfp4_quantize as silu_and_mul_nvfp4_quantize
