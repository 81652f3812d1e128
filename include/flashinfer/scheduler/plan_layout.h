// The sizes and offsets of an attention plan. The planner fills them, the binding makes launch
// arguments from them, and tests read them under these names. Plain C++.
//
// The bytes lie in a CPU tensor, because planner and kernels are in different native modules. Every
// field is an int64_t, so that there is no padding.
#pragma once

#include <cstdint>

namespace flashinfer {

// Requests that share their tensors.
struct PlannedGroup {
  int64_t batch_size;
  int64_t qo_tokens;   // rows of q
  int64_t kv_entries;  // paged: entries of kv_indices in use; ragged: rows of k and v
};

struct PlanLayout {
  int64_t num_ctas;  // columns; 0: nothing to do
  int64_t num_merges;
  int64_t rows_per_slot;
  int64_t merged_rows;  // rows that one CTA merges
  int64_t num_slots;
  int64_t merges_offset;    // [bytes], in the int workspace
  int64_t counters_offset;  // [bytes]; negative: the kernel does not merge
  int64_t items_offset;     // [bytes]
  int64_t int_bytes;        // size that the int workspace must have
  int64_t used_bytes;       // bytes that this plan writes
  int64_t sums_offset;      // [bytes], in the float workspace: two floats per row; outputs are at 0
  int64_t float_bytes;      // size that the float workspace must have
  int64_t tile_q;           // packed rows of a tile of kind 0
  PlannedGroup groups[2];
};

}  // namespace flashinfer
