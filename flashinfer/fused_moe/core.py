"""Experts of Hopper, and those of Blackwell, which refuse every call.

Engines import these names on every GPU, from this module.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compat.backends import only_elsewhere
from ..tllm_enums import ActivationType as ActivationType
from ..tllm_enums import Fp8QuantizationType as Fp8QuantizationType
from ..tllm_enums import RoutingInputMode as RoutingInputMode
from ..tllm_enums import RoutingMethodType as RoutingMethodType
from ..tllm_enums import SfLayout
from ..tllm_enums import WeightLayout as WeightLayout
from .cutlass import cutlass_fused_moe as cutlass_fused_moe
from .cutlass import cutlass_fused_moe_workspace_size as cutlass_fused_moe_workspace_size
from .layouts import convert_to_block_layout as convert_to_block_layout
from .layouts import (
    get_reorder_rows_for_gated_act_gemm_row_indices as get_reorder_rows_for_gated_act_gemm_row_indices,  # noqa: E501
)
from .layouts import reorder_rows_for_gated_act_gemm as reorder_rows_for_gated_act_gemm

_BLACKWELL = (100, 103)


@only_elsewhere(_BLACKWELL)
def _maybe_get_cached_w3_w1_permute_indices(
    _cache_permute_indices: dict[Any, torch.Tensor],
    dst_w3_w1_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool = True,
) -> torch.Tensor:
    """Order of the rows of the first weights."""
    raise NotImplementedError


@only_elsewhere(_BLACKWELL)
def get_w2_permute_indices_with_cache(
    _cache_permute_indices: dict[Any, torch.Tensor],
    dst_w2_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool | None = None,
) -> torch.Tensor:
    """Order of the rows of the second weights."""
    raise NotImplementedError


@only_elsewhere(_BLACKWELL)
def trtllm_mxint4_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> list[torch.Tensor]:
    """Experts with weights of 4-bit integers."""
    raise NotImplementedError


@only_elsewhere(_BLACKWELL)
def trtllm_fp4_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = 3,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    num_fused_shared_experts: int | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[torch.Tensor]:
    """Experts with 4-bit weights, routed here."""
    raise NotImplementedError


@only_elsewhere(_BLACKWELL)
def trtllm_fp4_block_scale_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = 3,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    gemm1_lora_delta: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    num_fused_shared_experts: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[torch.Tensor]:
    """Experts with 4-bit weights, routed by the caller."""
    raise NotImplementedError
