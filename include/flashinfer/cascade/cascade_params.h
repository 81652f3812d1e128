// Arguments of the attention-state merges. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>

namespace flashinfer {

// Attention outputs over disjoint parts of the keys, and their log-sum-exp. Strides are in
// elements.
struct AttentionStates {
  const void* v;   // [num_tokens, num_states, num_heads, head_dim]; num_states may be absent
  const float* s;  // [num_tokens, num_states, num_heads], base 2; -inf: no keys
  int64_t v_stride_token;
  int64_t v_stride_state;
  int64_t v_stride_head;
  int64_t s_stride_token;
  int64_t s_stride_state;
  int64_t s_stride_head;
};

struct MergeStatesParams {
  AttentionStates states;  // the first of two states, or all of them
  AttentionStates other;   // the second of two states; unused when there are `num_states`
  void* v_out;             // [num_tokens, num_heads, head_dim]; may be states.v
  float* s_out;            // [num_tokens, num_heads]; may be states.s
  int64_t v_out_stride_token;
  int64_t v_out_stride_head;
  int64_t s_out_stride_token;
  int64_t s_out_stride_head;
  const uint8_t* mask;  // [num_tokens]; may be null; 0: leave this token's output unchanged
  int64_t mask_stride;
  uint32_t num_tokens;
  uint32_t num_states;
  uint32_t num_heads;
  uint32_t head_dim;
  FastDivisor units_per_head;  // set at launch: vectors of a head
  bool streams;                // set at launch, two states only: reads and writes leave L2 first
};

}  // namespace flashinfer
