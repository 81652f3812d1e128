"""The variant whose queries see earlier keys, and those of a range of their own in both directions.

For prompts with images: their tokens see each other, text is causal.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._common.dtypes import check_dtype
from ..core import JitSpec
from .config import AttentionConfig, choose_tile_q, tile_head_dim
from .modules import gen_attention_module
from .variant import make_variant

_DECLARATION = r"""
struct CausalBidirectionalRanges : AttentionVariantBase {
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ CausalBidirectionalRanges(const Params& params, uint32_t batch_idx,
                                                uint8_t* smem_ptr) {
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int32_t key = static_cast<int32_t>(kv_idx);
    // Queries are the last tokens of the request.
    const int32_t shift =
        static_cast<int32_t>(params.get_kv_len(batch_idx) - params.get_qo_len(batch_idx));
    const int64_t distance = int64_t(static_cast<int32_t>(qo_idx)) + shift - key;
    const int64_t row = int64_t(params.qo_indptr[batch_idx]) + qo_idx;
    const int32_t* const range = params.bidirectional_ranges + 2 * row;
    const bool is_causal =
        distance >= 0 && (params.causal_window_left < 0 || distance <= params.causal_window_left);
    const bool is_in_range =
        range[0] <= key && key <= range[1] &&
        (params.range_window_left < 0 || distance <= params.range_window_left);
    return is_causal || is_in_range;
  })
};
"""


def ranges_jit_args(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
) -> list[Any]:
    """`jit_args` of a paged prefill wrapper.

    Its ``run`` takes the ranges ``[rows, 2]`` and the first row of each request, then the windows.
    """
    types = [dtype_q, dtype_kv, dtype_o, torch.int32, head_dim_qk, head_dim_vo]
    tensors = [["bidirectional_ranges", "qo_indptr"], ["int32_t", "int32_t"]]
    scalars = [["causal_window_left", "range_window_left"], ["int64_t", "int64_t"]]
    name = "CausalBidirectionalRanges"
    return ["causal_bidirectional_ranges", *types, *tensors, *scalars, name, _DECLARATION]


def gen_batch_prefill_bidirectional_ranges_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
) -> JitSpec:
    """The portable module of ``BatchPrefillWithCausalBidirectionalRangesWrapper``, long prompts.

    Parameters
    ----------
    dtype_q, dtype_kv, dtype_o : torch.dtype
        Types of queries, of keys and values, and of outputs.
    dtype_idx : torch.dtype
        int32.
    head_dim_qk, head_dim_vo : int
        Head sizes of queries and keys, and of values and outputs.

    Raises
    ------
    ValueError
        If there is no kernel for an argument.
    """
    check_dtype("dtype_idx", dtype_idx, (torch.int32,))
    arguments = ranges_jit_args(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo)
    many = float("inf")
    tile_q = choose_tile_q(many, many, tile_head_dim(head_dim_qk, head_dim_vo))
    config = AttentionConfig(
        dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, tile_q, custom_variant=True
    )
    return gen_attention_module(config, make_variant(arguments[0], *arguments[7:]))
