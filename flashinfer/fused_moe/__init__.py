"""Mixtures of experts: routing, the experts' products, and names that engines import."""

from ..tllm_enums import ActivationType as ActivationType
from ..tllm_enums import Fp8QuantizationType as Fp8QuantizationType
from ..tllm_enums import RoutingInputMode as RoutingInputMode
from ..tllm_enums import RoutingMethodType as RoutingMethodType
from ..tllm_enums import WeightLayout as WeightLayout
from .api import GELU as GELU
from .api import ActivationConfig as ActivationConfig
from .api import BackendOptions as BackendOptions
from .api import CutlassBf16Config as CutlassBf16Config
from .api import CutlassFp8BlockConfig as CutlassFp8BlockConfig
from .api import CutlassFp8PerTensorConfig as CutlassFp8PerTensorConfig
from .api import CutlassW4A16Config as CutlassW4A16Config
from .api import ExecutionConfig as ExecutionConfig
from .api import ExpertConfig as ExpertConfig
from .api import GeGLU as GeGLU
from .api import GeGLUTanh as GeGLUTanh
from .api import Identity as Identity
from .api import MoEActivationPack as MoEActivationPack
from .api import MoEConfig as MoEConfig
from .api import MoEFinalizeConfig as MoEFinalizeConfig
from .api import MoEWeightPack as MoEWeightPack
from .api import QuantConfig as QuantConfig
from .api import QuantFormat as QuantFormat
from .api import ReLU as ReLU
from .api import ReLU2 as ReLU2
from .api import RoutingConfig as RoutingConfig
from .api import SiLU as SiLU
from .api import SiTU as SiTU
from .api import SwiGLU as SwiGLU
from .api import SwiGLUStep as SwiGLUStep
from .bgmv_moe import bgmv_moe as bgmv_moe
from .bgmv_moe import bgmv_moe_expand as bgmv_moe_expand
from .bgmv_moe import bgmv_moe_shrink as bgmv_moe_shrink
from .bgmv_moe import fill_w_ptr as fill_w_ptr
from .bgmv_moe import has_bgmv_moe as has_bgmv_moe
from .bgmv_plan import BGMVMoEPortablePlan as BGMVMoEPortablePlan
from .bgmv_plan import prepare_bgmv_moe as prepare_bgmv_moe
from .core import trtllm_fp4_block_scale_moe as trtllm_fp4_block_scale_moe
from .core import trtllm_fp4_block_scale_routed_moe as trtllm_fp4_block_scale_routed_moe
from .core import trtllm_mxint4_block_scale_moe as trtllm_mxint4_block_scale_moe
from .cutlass import cutlass_fused_moe as cutlass_fused_moe
from .cutlass import cutlass_fused_moe_workspace_size as cutlass_fused_moe_workspace_size
from .layer import MoELayer as MoELayer
from .layouts import convert_to_block_layout as convert_to_block_layout
from .layouts import (
    interleave_moe_scales_for_sm90_mixed_gemm as interleave_moe_scales_for_sm90_mixed_gemm,
)
from .layouts import (
    interleave_moe_weights_for_sm90_mixed_gemm as interleave_moe_weights_for_sm90_mixed_gemm,
)
from .layouts import reorder_rows_for_gated_act_gemm as reorder_rows_for_gated_act_gemm
from .moe_lora_delta import bgmv_moe_gemm1_lora_delta as bgmv_moe_gemm1_lora_delta
from .moe_lora_delta import bgmv_moe_gemm2_lora_delta as bgmv_moe_gemm2_lora_delta
from .monomoe import alloc_scratchpad as alloc_scratchpad
from .monomoe import get_scratchpad_size_bytes as get_scratchpad_size_bytes
from .monomoe import has_monomoe as has_monomoe
from .monomoe import interleave_for_tma_wgmma_up as interleave_for_tma_wgmma_up
from .monomoe import mono_moe as mono_moe
from .routing import fused_topk_deepseek as fused_topk_deepseek
from .routing import hash_topk as hash_topk
from .runners import CutlassBf16Runner as CutlassBf16Runner
from .runners import CutlassFp8BlockRunner as CutlassFp8BlockRunner
from .runners import CutlassFp8PerTensorRunner as CutlassFp8PerTensorRunner
from .runners import CutlassW4A16Runner as CutlassW4A16Runner
