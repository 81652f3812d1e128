// Arguments of the gated delta rule in chunks. Plain C++: shared by kernels, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/linear_attention/delta_rule_params.h>

namespace flashinfer {

inline constexpr int kChunkSize = 64;
inline constexpr int kSlotsPerCounter = 8;

// Results of chunk_transform that chunk_scan reads: one chunk of one head; C = kChunkSize.
struct ChunkWorkspace {
  void* solve;     // [slots, heads, C, C], type of q: (I + A)^-1 diag(beta)
  void* scores;    // [slots, heads, C, C], type of q: scale (q_i k_j) decay(i, j], j <= i
  float* factors;  // [slots, heads, 4 C]: see ChunkFactor; decay by channel: [slots, heads, K]
  // Decay by channel, [slots, heads, 3, C, K], type of q, with K channels of a key: keys k d(..,
  // i], queries scale q d(.., i] and keys of updates k d(i, C], norms included.
  void* operands;
};

// Rows of `factors`, C numbers each; tokens beyond the sequence decay by 1.
enum ChunkFactor : int {
  kKeyFactor = 0,     // decay(.., i] / |k_i|: of S k_i
  kQueryFactor = 1,   // scale decay(.., i] / |q_i|: of S q_i
  kUpdateFactor = 2,  // decay(i, C] / |k_i|: of token i's update at the end of the chunk
  kChunkDecay = 3,    // [0]: of the whole chunk
};

// Arguments of the state space duality of Mamba-2, beside those of the recurrence. There q is C, k
// is B, v is x, gate is dt and a_log is A itself: S = exp(A dt) S + (dt x) B^T; out = (S C + skip
// x) silu(z).
struct SsdParams {
  const float* skip;  // [state_heads]; null: 0
  TokenHeads z;       // as out; null: the output is not gated
  bool softplus;      // of dt + dt_bias
  float lowest_dt, highest_dt;
};

// Sequences are packed; `recurrence` has their tensors, states and gates. Its state fields that are
// used are state, state_out, read_slot, write_slot and snapshots (every multiple of kChunkSize).
struct ChunkDeltaRuleParams {
  DeltaRuleParams recurrence;
  SsdParams ssd;  // the delta rule leaves it empty
  ChunkWorkspace workspace;
  int32_t num_slots;  // at least total tokens / C + sequences
  // Zeros [num_slots / kSlotsPerCounter rounded up, heads]: how many of these slots are
  // transformed. The stages run at once then; null: one after the other.
  uint32_t* progress;
};

}  // namespace flashinfer
