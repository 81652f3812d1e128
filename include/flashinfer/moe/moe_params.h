// Arguments of what stands around the products of a mixture of experts. Plain C++: shared by
// kernels, launchers and bindings.
#pragma once

#include <cstdint>

namespace flashinfer {

// What kernels hold at most, which bindings check: a lane of a warp for each choice of a token and
// for each group of experts, and an offset in shared memory for each expert that is here.
inline constexpr int kMoeMaxChoices = 32, kMoeMaxGroups = 32, kMoeMaxExperts = 1024;

// How a router's logits become scores.
enum class MoeScore { softmax, sigmoid };

// Which experts a token goes to, and with which weights.
struct MoeRouteParams {
  const void* logits;     // [num_tokens, num_experts]
  int64_t logits_stride;  // elements from one token to the next
  const float* bias;      // [num_experts], added to scores for the choice alone; null: none
  float* weights;         // [num_tokens, top_k]
  int32_t* experts;       // [num_tokens, top_k], from the best one on
  uint32_t num_tokens, num_experts, top_k;
  // Experts are chosen from the best `top_groups` of `num_groups` groups of neighbours. A group
  // counts what its two best experts have together.
  uint32_t num_groups, top_groups;
  bool renormalize;  // a token's weights sum to `scale`
  float scale;       // factor of all weights
};

// The experts that a table names for each token's id, and their weights.
struct MoeHashParams {
  const void* logits;  // [num_tokens, num_experts]
  int64_t logits_stride;
  const void* ids;    // [num_tokens]
  const void* table;  // [num_ids, top_k]
  int64_t num_ids;
  float* weights;    // [num_tokens, top_k]
  int32_t* experts;  // [num_tokens, top_k]
  uint32_t num_tokens, num_experts, top_k;
};

// The rows of the grouped products: a row per chosen expert that is here, sorted by expert, and
// for one expert in the order of the tokens.
struct MoeMapParams {
  const void* experts;  // [num_tokens, top_k]
  uint32_t num_entries, top_k;
  int64_t first_expert;  // experts first_expert to first_expert + num_experts - 1 are here
  uint32_t num_experts;
  int32_t* offsets;    // [num_experts + 1]: expert e has rows offsets[e] to offsets[e + 1]
  int32_t* row_token;  // [num_entries]: the token of each row; not written after the last row
  int32_t* entry_row;  // [num_tokens, top_k]: the row of each choice; -1 if its expert is elsewhere
};

// out[t] = sum over j of weights[t, j] rows[entry_row[t, j]], in the order of j.
struct MoeCombineParams {
  const void* rows;
  int64_t rows_stride;
  const int32_t* entry_row;  // [num_tokens, top_k]; others than 0 to num_rows - 1: nothing
  const float* weights;      // [num_tokens, top_k]
  void* out;                 // [num_tokens, hidden]
  int64_t out_stride;
  uint32_t num_rows, num_tokens, top_k, hidden;
  // The previous kernel of the stream writes nothing but rows: what it follows has finished.
  bool starts_early;
};

// out = sum over j of weights[j] fc2[e] (silu(gate[e] x) * (value[e] x)), e = experts[j].
struct MoeTokenParams {
  const void* x;         // [size]
  const void* fc1;       // [num_experts, 2 * inner, size]: rows of the values, then of the gates
  const void* fc2;       // [num_experts, size, inner]
  const void* experts;   // [top_k]; others than those of MoeMapParams count nothing
  const float* weights;  // [top_k]
  void* hidden;          // [top_k, inner], between the products
  void* out;             // [size]
  int64_t first_expert;
  uint32_t num_experts, top_k, size, inner;
};

}  // namespace flashinfer
