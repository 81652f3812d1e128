"""Mixtures of experts: routing, the experts' products, and names that engines import."""

from ..tllm_enums import ActivationType as ActivationType
from ..tllm_enums import Fp8QuantizationType as Fp8QuantizationType
from ..tllm_enums import RoutingInputMode as RoutingInputMode
from ..tllm_enums import RoutingMethodType as RoutingMethodType
from ..tllm_enums import WeightLayout as WeightLayout
from .core import trtllm_fp4_block_scale_moe as trtllm_fp4_block_scale_moe
from .core import trtllm_fp4_block_scale_routed_moe as trtllm_fp4_block_scale_routed_moe
from .core import trtllm_mxint4_block_scale_moe as trtllm_mxint4_block_scale_moe
from .cutlass import cutlass_fused_moe as cutlass_fused_moe
from .cutlass import cutlass_fused_moe_workspace_size as cutlass_fused_moe_workspace_size
from .layouts import convert_to_block_layout as convert_to_block_layout
from .layouts import reorder_rows_for_gated_act_gemm as reorder_rows_for_gated_act_gemm
from .routing import fused_topk_deepseek as fused_topk_deepseek
from .routing import hash_topk as hash_topk
