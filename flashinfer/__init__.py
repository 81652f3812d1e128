"""GPU kernels for LLM serving, compiled when they are first called."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._common.importing import is_command_line, without_collections
from .version import __git_version__ as __git_version__
from .version import __version__ as __version__

if not is_command_line():
    with without_collections():
        from . import api_logging as api_logging
        from .activation import gelu_and_mul as gelu_and_mul
        from .activation import gelu_tanh_and_mul as gelu_tanh_and_mul
        from .activation import silu_and_mul as silu_and_mul
        from .activation import (
            silu_and_mul_scaled_nvfp4_experts_quantize as silu_and_mul_scaled_nvfp4_experts_quantize,  # noqa: E501
        )
        from .attention import BatchAttention as BatchAttention
        from .attention import (
            BatchAttentionWithAttentionSinkWrapper as BatchAttentionWithAttentionSinkWrapper,
        )
        from .attention import (
            BatchPrefillWithCausalBidirectionalRangesWrapper as BatchPrefillWithCausalBidirectionalRangesWrapper,  # noqa: E501
        )
        from .cascade import (
            BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
        )
        from .cascade import (
            BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
        )
        from .cascade import MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper
        from .cascade import merge_state as merge_state
        from .cascade import merge_state_in_place as merge_state_in_place
        from .cascade import merge_states as merge_states
        from .decode import BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper
        from .decode import (
            CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper,  # noqa: E501
        )
        from .decode import cudnn_batch_decode_with_kv_cache as cudnn_batch_decode_with_kv_cache
        from .decode import fast_decode_plan as fast_decode_plan
        from .decode import single_decode_with_kv_cache as single_decode_with_kv_cache
        from .fi_trace import fi_trace as fi_trace
        from .mhc import mhc_post as mhc_post
        from .mhc import mhc_pre_big_fuse as mhc_pre_big_fuse
        from .mhc import mhc_pre_big_fuse_with_prenorm as mhc_pre_big_fuse_with_prenorm
        from .norm import fused_add_rmsnorm as fused_add_rmsnorm
        from .norm import fused_add_rmsnorm_fp8_block_quant as fused_add_rmsnorm_fp8_block_quant
        from .norm import fused_add_rmsnorm_quant as fused_add_rmsnorm_quant
        from .norm import fused_qk_rmsnorm_rope as fused_qk_rmsnorm_rope
        from .norm import fused_rmsnorm_silu as fused_rmsnorm_silu
        from .norm import gated_residual_next_rmsnorm as gated_residual_next_rmsnorm
        from .norm import gated_residual_rmsnorm as gated_residual_rmsnorm
        from .norm import gemma_fused_add_rmsnorm as gemma_fused_add_rmsnorm
        from .norm import gemma_rmsnorm as gemma_rmsnorm
        from .norm import layernorm as layernorm
        from .norm import layernorm_quant as layernorm_quant
        from .norm import rmsnorm as rmsnorm
        from .norm import rmsnorm_quant as rmsnorm_quant
        from .norm import rmsnorm_sigmoid_gate as rmsnorm_sigmoid_gate
        from .norm import (
            supports_gated_residual_next_rmsnorm as supports_gated_residual_next_rmsnorm,
        )
        from .norm import supports_gated_residual_rmsnorm as supports_gated_residual_rmsnorm
        from .norm import supports_rmsnorm_sigmoid_gate as supports_rmsnorm_sigmoid_gate
        from .page import append_paged_kv_cache as append_paged_kv_cache
        from .page import append_paged_mla_kv_cache as append_paged_mla_kv_cache
        from .page import get_batch_indices_positions as get_batch_indices_positions
        from .page import get_seq_lens as get_seq_lens
        from .page import (
            nvfp4_quantize_append_paged_kv_cache as nvfp4_quantize_append_paged_kv_cache,
        )
        from .page import (
            nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,  # noqa: E501
        )
        from .pod import BatchPODWithPagedKVCacheWrapper as BatchPODWithPagedKVCacheWrapper
        from .pod import PODWithPagedKVCacheWrapper as PODWithPagedKVCacheWrapper
        from .prefill import (
            BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper,
        )
        from .prefill import (
            BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper,
        )
        from .prefill import single_prefill_with_kv_cache as single_prefill_with_kv_cache
        from .prefill import (
            single_prefill_with_kv_cache_return_lse as single_prefill_with_kv_cache_return_lse,
        )
        from .quantization import block_scale_interleave as block_scale_interleave
        from .quantization import e2m1_and_ufp8sf_scale_to_float as e2m1_and_ufp8sf_scale_to_float
        from .quantization import fp4_quantize as fp4_quantize
        from .quantization import get_fp4_quantization_module as get_fp4_quantization_module
        from .quantization import make_nvfp4_global_scale as make_nvfp4_global_scale
        from .quantization import mxfp4_dequantize as mxfp4_dequantize
        from .quantization import mxfp4_dequantize_host as mxfp4_dequantize_host
        from .quantization import mxfp4_quantize as mxfp4_quantize
        from .quantization import mxfp8_dequantize_host as mxfp8_dequantize_host
        from .quantization import mxfp8_grouped_quantize as mxfp8_grouped_quantize
        from .quantization import mxfp8_quantize as mxfp8_quantize
        from .quantization import nvfp4_batched_quantize as nvfp4_batched_quantize
        from .quantization import nvfp4_block_scale_interleave as nvfp4_block_scale_interleave
        from .quantization import nvfp4_kv_dequantize as nvfp4_kv_dequantize
        from .quantization import nvfp4_kv_dequantize_paged as nvfp4_kv_dequantize_paged
        from .quantization import nvfp4_kv_quantize as nvfp4_kv_quantize
        from .quantization import nvfp4_quantize as nvfp4_quantize
        from .quantization import nvfp4_quantize_paged_kv_cache as nvfp4_quantize_paged_kv_cache
        from .quantization import packbits as packbits
        from .quantization import scaled_fp4_grouped_quantize as scaled_fp4_grouped_quantize
        from .quantization import segment_packbits as segment_packbits
        from .quantization import shuffle_matrix_a as shuffle_matrix_a
        from .quantization import shuffle_matrix_sf_a as shuffle_matrix_sf_a
        from .quantization import silu_and_mul_nvfp4_quantize as silu_and_mul_nvfp4_quantize
        from .rope import apply_llama31_rope as apply_llama31_rope
        from .rope import apply_llama31_rope_inplace as apply_llama31_rope_inplace
        from .rope import apply_llama31_rope_pos_ids as apply_llama31_rope_pos_ids
        from .rope import apply_llama31_rope_pos_ids_inplace as apply_llama31_rope_pos_ids_inplace
        from .rope import apply_rope as apply_rope
        from .rope import apply_rope_inplace as apply_rope_inplace
        from .rope import apply_rope_pos_ids as apply_rope_pos_ids
        from .rope import apply_rope_pos_ids_inplace as apply_rope_pos_ids_inplace
        from .rope import apply_rope_with_cos_sin_cache as apply_rope_with_cos_sin_cache
        from .rope import (
            apply_rope_with_cos_sin_cache_inplace as apply_rope_with_cos_sin_cache_inplace,
        )
        from .sampling import chain_speculative_sampling as chain_speculative_sampling
        from .sampling import min_p_sampling_from_probs as min_p_sampling_from_probs
        from .sampling import sampling_from_logits as sampling_from_logits
        from .sampling import sampling_from_probs as sampling_from_probs
        from .sampling import softmax as softmax
        from .sampling import top_k_mask_logits as top_k_mask_logits
        from .sampling import top_k_renorm_probs as top_k_renorm_probs
        from .sampling import top_k_sampling_from_probs as top_k_sampling_from_probs
        from .sampling import top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits
        from .sampling import top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs
        from .sampling import top_p_renorm_probs as top_p_renorm_probs
        from .sampling import top_p_sampling_from_probs as top_p_sampling_from_probs
        from .sparse import BlockSparseAttentionWrapper as BlockSparseAttentionWrapper
        from .sparse import (
            VariableBlockSparseAttentionWrapper as VariableBlockSparseAttentionWrapper,
        )
        from .tllm_enums import ActivationType as ActivationType
        from .tllm_enums import RoutingMethodType as RoutingMethodType
        from .tllm_enums import SfLayout as SfLayout
        from .tllm_enums import is_gated_activation as is_gated_activation
        from .topk import TopKTieBreak as TopKTieBreak
        from .topk import top_k as top_k
        from .topk import top_k_page_table_transform as top_k_page_table_transform
        from .topk import top_k_ragged_transform as top_k_ragged_transform
        from .utils import next_positive_power_of_2 as next_positive_power_of_2
        from .xqa import xqa as xqa

        # Last: FLASHINFER_BACKEND=reference routes what was imported above.
        from .reference_backend import reference_backend as reference_backend  # isort: skip

if _TYPE_CHECKING:
    from . import aot as aot
    from . import collect_env as collect_env
    from . import comm as comm
    from . import concat_ops as concat_ops
    from . import dense_mqa as dense_mqa
    from . import diffusion_ops as diffusion_ops
    from . import fp4_quantization as fp4_quantization
    from . import fp8_quantization as fp8_quantization
    from . import fused_moe as fused_moe
    from . import gdn2_prefill as gdn2_prefill
    from . import gdn_decode as gdn_decode
    from . import gdn_kernels as gdn_kernels
    from . import gdn_prefill as gdn_prefill
    from . import kda as kda
    from . import kda_decode as kda_decode
    from . import kda_prefill as kda_prefill
    from . import logits_processor as logits_processor
    from . import mamba as mamba
    from . import paged_mqa as paged_mqa
    from . import testing as testing
    from . import trace_apply as trace_apply
    from .attn_scores import compute_paged_mqa_logits_schedule as compute_paged_mqa_logits_schedule
    from .attn_scores import fp8_paged_mqa_logits as fp8_paged_mqa_logits
    from .attn_scores import min_block_table_width as min_block_table_width
    from .attn_scores import padded_seq_len as padded_seq_len
    from .attn_scores import precompile_paged_mqa_logits as precompile_paged_mqa_logits
    from .autotune_cache import autotune_v2 as autotune_v2
    from .autotune_cache import autotune_v2_reload as autotune_v2_reload
    from .autotuner import MeasurementPolicy as MeasurementPolicy
    from .autotuner import autotune as autotune
    from .concat_ops import concat_mla_kv_quant_fp8 as concat_mla_kv_quant_fp8
    from .fused_moe import cutlass_fused_moe as cutlass_fused_moe
    from .fused_moe import reorder_rows_for_gated_act_gemm as reorder_rows_for_gated_act_gemm
    from .gdn2_prefill import chunk_gated_delta_rule2 as chunk_gated_delta_rule2
    from .gdn_decode import gdn_fused_decode_step as gdn_fused_decode_step
    from .gdn_decode import gdn_fused_decode_step_supported as gdn_fused_decode_step_supported
    from .gdn_prefill import chunk_gated_delta_product as chunk_gated_delta_product
    from .gdn_prefill import chunk_gated_delta_rule as chunk_gated_delta_rule
    from .gemm import SegmentGEMMWrapper as SegmentGEMMWrapper
    from .gemm import bmm_bf16 as bmm_bf16
    from .gemm import bmm_fp8 as bmm_fp8
    from .gemm import grouped_mm_bf16 as grouped_mm_bf16
    from .gemm import grouped_mm_fp8 as grouped_mm_fp8
    from .gemm import mm_bf16 as mm_bf16
    from .gemm import mm_fp8 as mm_fp8
    from .kda_decode import fused_kda_decode as fused_kda_decode
    from .kda_decode import packed_fused_kda_decode as packed_fused_kda_decode
    from .kda_decode import packed_kda_decode as packed_kda_decode
    from .kda_decode import recurrent_kda as recurrent_kda
    from .kda_prefill import KDAPrefillPlanCache as KDAPrefillPlanCache
    from .kda_prefill import RecurrentKDAPrefillWorkspace as RecurrentKDAPrefillWorkspace
    from .kda_prefill import RecurrentKDAPrefillWrapper as RecurrentKDAPrefillWrapper
    from .kda_prefill import (
        kda_prefill_supports_fp32_checkpoints as kda_prefill_supports_fp32_checkpoints,
    )
    from .kda_prefill import prepare_bf16_kda_prefill as prepare_bf16_kda_prefill
    from .kda_prefill import prepare_tf32_kda_prefill as prepare_tf32_kda_prefill
    from .mla import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
    from .topk_varlen import top_k_varlen as top_k_varlen
else:
    # Families that not every program needs, with their names here.
    _LATER = {
        "attn_scores": (
            "compute_paged_mqa_logits_schedule",
            "fp8_paged_mqa_logits",
            "min_block_table_width",
            "padded_seq_len",
            "precompile_paged_mqa_logits",
        ),
        "autotune_cache": ("autotune_v2", "autotune_v2_reload"),
        "autotuner": ("MeasurementPolicy", "autotune"),
        "concat_ops": ("concat_mla_kv_quant_fp8",),
        "fused_moe": ("cutlass_fused_moe", "reorder_rows_for_gated_act_gemm"),
        "gdn2_prefill": ("chunk_gated_delta_rule2",),
        "gdn_decode": ("gdn_fused_decode_step", "gdn_fused_decode_step_supported"),
        "gdn_prefill": ("chunk_gated_delta_product", "chunk_gated_delta_rule"),
        "gemm": (
            "SegmentGEMMWrapper",
            "bmm_bf16",
            "bmm_fp8",
            "grouped_mm_bf16",
            "grouped_mm_fp8",
            "mm_bf16",
            "mm_fp8",
        ),
        "kda_decode": (
            "fused_kda_decode",
            "packed_fused_kda_decode",
            "packed_kda_decode",
            "recurrent_kda",
        ),
        "kda_prefill": (
            "KDAPrefillPlanCache",
            "RecurrentKDAPrefillWorkspace",
            "RecurrentKDAPrefillWrapper",
            "kda_prefill_supports_fp32_checkpoints",
            "prepare_bf16_kda_prefill",
            "prepare_tf32_kda_prefill",
        ),
        "mla": ("BatchMLAPagedAttentionWrapper",),
        "topk_varlen": ("top_k_varlen",),
    }

    def __getattr__(name: str) -> object:
        """What few programs need is imported when it is first named."""
        from ._common.importing import missing_attribute

        return missing_attribute(name, globals(), _LATER)

    def __dir__() -> list[str]:
        return sorted({*globals(), *(name for names in _LATER.values() for name in names)})
