// Arguments of the gated delta rule in chunks. Plain C++: shared by kernels, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/linear_attention/delta_rule_params.h>

namespace flashinfer {

inline constexpr int kChunkSize = 64;

// Results of chunk_transform that chunk_scan reads: one chunk of one head; C = kChunkSize.
struct ChunkWorkspace {
  void* solve;     // [slots, heads, C, C], type of q: (I + A)^-1 diag(beta)
  void* scores;    // [slots, heads, C, C], type of q: scale (q_i k_j) decay(i, j], j <= i
  float* factors;  // [slots, heads, 4 C]: see ChunkFactor
};

// Rows of `factors`, C numbers each; tokens beyond the sequence decay by 1.
enum ChunkFactor : int {
  kKeyFactor = 0,     // decay(.., i] / |k_i|: of S k_i
  kQueryFactor = 1,   // scale decay(.., i] / |q_i|: of S q_i
  kUpdateFactor = 2,  // decay(i, C] / |k_i|: of token i's update at the end of the chunk
  kChunkDecay = 3,    // [0]: of the whole chunk
};

// Sequences are packed; `recurrence` has their tensors, states and gates. Its state fields that are
// used are state, state_out, read_slot, write_slot and snapshots (every multiple of kChunkSize).
struct ChunkDeltaRuleParams {
  DeltaRuleParams recurrence;
  ChunkWorkspace workspace;
  int32_t num_slots;  // at least total tokens / C + sequences
};

}  // namespace flashinfer
