// Arguments of chain speculative sampling. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/sampling/sampling_params.h>

namespace flashinfer {

struct SpeculativeParams {
  const float* draft_probs;        // [num_rows, num_drafts, vocab_size], contiguous
  const int32_t* draft_token_ids;  // [num_rows, num_drafts], contiguous
  const float* target_probs;       // [num_rows, num_drafts + 1, vocab_size], contiguous
  int32_t* token_ids;              // [num_rows, num_drafts + 1]; -1 after the last token
  int32_t* num_accepted;           // [num_rows], added to
  int32_t* num_emitted;            // [num_rows], added to
  PerRow<uint64_t> seed;           // [num_rows], or [1] if shared
  PerRow<uint64_t> offset;
  uint32_t num_rows;
  uint32_t num_drafts;
  uint32_t vocab_size;
  bool seed_is_shared;
  bool offset_is_shared;
  bool rows_have_streams;  // as in SamplingParams
  uint32_t max_cluster;    // CTAs per row; 0: only the device limits them
  uint32_t max_vecs;       // set by the launch
};

}  // namespace flashinfer
