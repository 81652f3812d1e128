// Arguments of the attention kernels. Plain C++.
#pragma once

#include <cstdint>
#include <vector_types.h>
#include <flashinfer/attention/device_plan_params.h>
#include <flashinfer/attention/soft_cap.h>
#include <flashinfer/common/fast_divisor.h>
#include <flashinfer/scheduler/work.h>

namespace flashinfer {

// A factor per head; with `stride` 0 one for all heads. Null `data` stands for 1.
struct HeadScale {
  const float* data;
  int64_t stride;
};

// Factors beside sm_scale and AttentionTensors::v_scale; read if the module has head scales.
struct HeadScales {
  float logits;    // not negative
  HeadScale q;     // query heads; q and k multiply the logits
  HeadScale k, v;  // KV heads; v multiplies the output
};

// Parameters of the built-in variant options. A user's variant derives from it and adds its own
// tensors and scalars; a member of the same name hides the one here.
struct VariantParams {
  float sm_scale;         // logits are q.k * sm_scale; q_scale and k_scale are folded in
  float logits_soft_cap;  // c * tanh(logits / c); read if the module has soft cap
  int32_t window_left;    // keys further back than this are masked; negative: no limit
  uint32_t num_qo_heads;
  uint32_t num_kv_heads;
  const float* alibi_slopes;  // [num_qo_heads]; null without ALiBi
  const float* sinks;         // [num_qo_heads] logits; null without sinks
  // Packed little-endian bits, qo_len x kv_len per request; of drafts a word for each query.
  const uint8_t* custom_mask;
  const int32_t* mask_indptr;              // [batch_size + 1] first byte of each request's mask
  const uint32_t* prefix_len_ptr;          // [batch_size] multi-item scoring
  const uint16_t* token_pos_in_items_ptr;  // [batch_size, token_pos_in_items_len]
  uint32_t token_pos_in_items_len;
  const uint16_t* max_item_len_ptr;  // [batch_size]
  float rope_scale_rcp;              // positions are multiplied by this
  float rope_theta_rcp_log2;         // -log2(theta) * 2 / head_dim: frequency i is exp2(i * this)
};

// The parameters of a module with a soft cap.
struct CappedVariantParams : VariantParams {
  SoftCapFactors soft_cap;  // logits_soft_cap of q.k, in base 2
};

// Once the scale and the cap are known.
inline void set_soft_cap(VariantParams&) {}
inline void set_soft_cap(CappedVariantParams& params) {
  const float scale = params.sm_scale < 0.f ? -params.sm_scale : params.sm_scale;
  params.soft_cap = SoftCapFactors(params.logits_soft_cap, scale, 1.44269504f);
}

// Where the scales of 8-bit outputs go, one for each token and query head.
struct OutputScale {
  float* data;
  int64_t stride_token, stride_head;
};

// Scales of 4-bit rows: e4m3, one for 16 elements, of the rows' pages, tokens and heads.
struct BlockScales {
  const uint8_t* data;
  int64_t stride_page, stride_token, stride_head;  // page stride unused for ragged
};

// Tensors of one tile shape. Strides are in elements; the last dimension is contiguous, and rows
// start at multiples of 16 bytes.
struct AttentionTensors {
  const void* q;  // [tokens, num_qo_heads, head_dim_qk]
  const void* k;  // paged [pages, slots, num_kv_heads, head_dim_qk] by strides; else tokens
  const void* v;  // the same with head_dim_vo
  void* o;        // [tokens, num_qo_heads, head_dim_vo]
  float* lse;     // [tokens, num_qo_heads] base 2, contiguous; null: not wanted
  const int32_t* kv_indices;  // page numbers; null for ragged
  int64_t q_stride_token, q_stride_head;
  int64_t o_stride_token, o_stride_head;
  int64_t k_stride_page, k_stride_token, k_stride_head;  // page stride unused for ragged
  int64_t v_stride_page, v_stride_token, v_stride_head;
  uint32_t num_pages;  // pages of the cache; a page number beyond them is never followed
  int64_t num_qo_tokens, num_kv_tokens;  // tokens of q, and of ragged k and v
  float v_scale;                         // multiplies the output
  HeadScales head_scales;
  BlockScales k_sf, v_sf;  // of 4-bit k and v, whose elements are pairs of codes
};

// `Variant` is VariantParams or derives from it.
template <typename Variant_>
struct AttentionParams {
  using Variant = Variant_;

  // WorkItem::kind is the index; the second is used only in launches of two shapes.
  AttentionTensors tensors[2];
  Variant variant;
  const WorkItem* items;
  const MergeItem* merges;
  // Partial results of split tiles: sum of p v, and per row (largest exponent, sum of p), with p =
  // 2^(exponent - largest). The pair keeps what an LSE would round away for large logits.
  float* partial_o;      // [slots, num_kv_heads, rows_per_slot, head_dim_vo]
  float2* partial_sums;  // [slots, num_kv_heads, rows_per_slot]
  FastDivisor num_ctas;  // lists of items; each is processed once per KV head
  uint32_t num_merges;   // 0: no tile was split
  uint32_t rows_per_slot;
  uint32_t merged_rows;  // rows that one CTA merges
  FastDivisor num_kv_heads;
  FastDivisor group_size;  // num_qo_heads / num_kv_heads
  FastDivisor page_size;
  // [num_merges, num_kv_heads] parts that are written, 0 between launches; null: another kernel
  // merges.
  uint32_t* counters;
  OutputScale o_scale;  // of 8-bit outputs, which launches of one shape have
  static constexpr bool kReadsLengths = false, kProfiled = false, kHasSecondVariant = false;
};

// For launches of two tile shapes: items of kind 1 have options of their own.
template <typename Variant_, typename Second>
struct TwoShapeAttentionParams : AttentionParams<Variant_> {
  Second second_variant;
  static constexpr bool kHasSecondVariant = true;
};

// For launches that read lengths in device memory instead of items and merges.
template <typename Variant_>
struct LengthsAttentionParams : AttentionParams<Variant_> {
  DevicePlanParams lengths;
  static constexpr bool kReadsLengths = true;
};

// For launches that record their events; `Base`: of one shape or of two.
template <typename Base>
struct ProfiledAttentionParams : Base {
  uint64_t* profile;  // buffer of profiler.cuh
  uint32_t profile_words;
  static constexpr bool kProfiled = true;
};

}  // namespace flashinfer
