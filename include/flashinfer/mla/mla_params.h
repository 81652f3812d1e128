// Arguments of an MLA launch. Plain C++.
//
// Multi-head latent attention in its absorbed form (DeepSeek-AI, "DeepSeek-V2", 2024): a token's
// key is [ckv, kpe], its value is ckv, and all query heads share both. For a row of queries
//   out = softmax(sm_scale * (q_nope ckv^T + q_pe kpe^T)) ckv
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>
#include <flashinfer/mla/plan_params.h>

namespace flashinfer {

// A tensor of queries or outputs [tokens, heads, dim]; strides in elements.
struct MlaRows {
  void* data;
  int64_t stride_token, stride_head;
};

// A paged cache [pages, page_size, dim]; strides in elements.
struct MlaCache {
  const void* data;
  int64_t stride_page, stride_token;
};

struct MlaParams {
  MlaRows q_nope, q_pe, o;
  MlaCache ckv, kpe;
  const int32_t* kv_indices;  // [num_indices] page numbers
  float* lse;                 // [tokens, heads]; may be null
  const float* sinks;         // [heads], logits that take part without a value; may be null
  const MlaPlanHeader* header;
  const int32_t* cta_begin;  // [num_ctas + 1]
  const MlaWorkItem* items;
  const MlaMerge* merges;
  MlaMergeCounters* counters;  // of each merge; on Hopper, null if no tile was cut
  void* partial_o;             // [slots, 64, head_dim_ckv] in the type of o, normalised
  float* partial_lse;          // [slots, 64], base 2
  FastDivisor num_heads, page_size;
  uint32_t num_tokens;  // of q
  uint32_t num_pages;   // of the cache
  uint32_t num_ctas, num_items;
  float sm_scale_log2;  // of logits, times log2(e)
  float o_scale;        // of outputs
  float rope_factor;    // of rotary products, beside sm_scale; read where caches have 8 bits
  float lse_factor;     // 1: base 2; ln 2: base e
  bool causal;          // the last query token is at the last KV token
  bool plan_is_older;   // than the grid before, which has waited for it
  bool plans_itself;    // CTAs write their items, as `planner` says
  bool in_pairs;        // as the plan says; read by launches of kernels of few rows
  bool merges_itself;   // no tile has more than kMlaFewParts parts; read by kernels of few rows
  MlaPlanParams planner;
  uint32_t profile_words;  // of `profile`
  uint64_t* profile;       // buffer of profiler.cuh; read by kernels that record their events
};

}  // namespace flashinfer
