"""Mixtures of experts: names that engines import; no kernels yet."""

from .core import convert_to_block_layout as convert_to_block_layout
from .core import trtllm_fp4_block_scale_moe as trtllm_fp4_block_scale_moe
from .core import trtllm_fp4_block_scale_routed_moe as trtllm_fp4_block_scale_routed_moe
from .core import trtllm_mxint4_block_scale_moe as trtllm_mxint4_block_scale_moe
