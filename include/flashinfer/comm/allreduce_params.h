// Arguments of the all-reduce with its fused steps. Plain C++: shared by kernel, launcher, binding.
#pragma once

#include <cstdint>
#include <flashinfer/comm/workspace.h>

namespace flashinfer {

// All tensors are contiguous; rows begin on 16 bytes. A row is a token; of a plain all-reduce, it
// is a chunk of the flat tensor, and the last one may be short.
struct AllReduceParams {
  comm::CommWorkspace workspace;
  const void* input;        // [rows, row_vecs] vectors, or what the module's Input reads
  const void* residual_in;  // [rows, hidden]
  const void* weight;       // [hidden]
  void* sum_out;            // [rows, hidden], may be null
  void* residual_out;       // [rows, hidden], may be null
  void* norm_out;           // [rows, hidden], may be null
  void* quant_out;          // codes of norm_out
  void* scale_out;          // scales of groups, in the module's layout, or of rows
  const float* scale;       // one element; null: scale_value
  float scale_value;
  float eps;
  float weight_bias;
  float inv_hidden;
  uint32_t num_rows;
  uint32_t row_vecs;     // vectors of 16 bytes in a row
  uint32_t total_vecs;   // in all rows; a plain all-reduce's last row may have fewer
  int64_t scale_stride;  // column-major scales
  // MoE inputs
  const float* expert_scales;    // reduction: [experts, tokens]
  const void* expert_weights;    // finalize: [tokens, top_k], may be null: 1
  const int32_t* permuted_rows;  // finalize: [tokens, top_k]; others than rows of input: none
  const void* shared_input;      // [tokens, hidden], may be null
  uint32_t num_terms;            // experts, or top_k
  uint32_t num_input_rows;       // finalize: rows of input
  float routed_scale;            // finalize: multiplies the experts' sum, not shared_input
  bool completes_at_end;         // lets the next grid start at the end, not at the beginning
};

// How a call is cut: `vecs_per_thread` is 1, 2 or 4.
struct AllReduceSchedule {
  bool one_shot;
  uint32_t threads;
  uint32_t vecs_per_thread;
  uint32_t num_ctas;
};

}  // namespace flashinfer
