// Arguments of the sampling kernels. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// A number for all rows, or one per row.
template <typename T>
struct PerRow {
  const T* data;  // device, [num_rows]; null: use `value`
  T value;

#ifdef __CUDACC__
  __device__ __forceinline__ T operator[](uint32_t row) const { return data ? data[row] : value; }
#endif
};

// How the kept set of a row is found.
enum class SamplingFilter {
  kNone,
  kTopK,
  kTopP,
  kMinP,
  kTopKTopP,       // top-k, then top-p of what is left
  kTopKTopPJoint,  // both on the whole row
};

enum class SamplingOutput {
  kToken,  // one index per row, drawn from the kept set
  kProbs,  // weights of the kept set divided by their sum; zero elsewhere
  kMask,   // the input where it is kept, -inf elsewhere
};

struct SamplingParams {
  const void* input;     // [num_input_rows, vocab_size] logits or weights, last dimension contiguous
  int64_t input_stride;  // elements
  void* out;             // kToken: [num_rows] int32 or int64; else [num_rows, vocab_size]
  int64_t out_stride;    // elements; not for kToken
  uint8_t* valid;        // [num_rows] bool, nullable: whether the row had a distribution to draw from
  const void* indices;   // [num_rows] int32 or int64, nullable: input row of each output row
  PerRow<float> temperature;  // logits are divided by it; by input row
  PerRow<int32_t> top_k;      // by input row; less than 1, or at least vocab_size: no limit
  PerRow<float> top_p;        // by input row
  PerRow<float> min_p;        // by input row
  PerRow<uint64_t> seed;      // by output row, [1] if shared
  PerRow<uint64_t> offset;    // by output row, [1] if shared
  uint32_t num_rows;
  uint32_t num_input_rows;
  uint32_t vocab_size;
  bool indices_are_64bit;
  bool tokens_are_64bit;
  bool seed_is_shared;    // one seed for all rows: rows then draw from different random streams
  bool offset_is_shared;  // one offset for all rows
  uint32_t max_vecs;   // vectors of a row that a CTA has shared memory for; set by the launch
};

}  // namespace flashinfer
