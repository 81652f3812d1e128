// Arguments of the sampling kernels. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/common/math.cuh>

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

// What the first pass of a draw by stream.cuh leaves of a tile.
struct TileStat {
  uint64_t sum;  // of weights in the units of the tile's maximum
  float max;     // NaN if the tile has one
};

struct StreamLayout {
  static constexpr uint32_t kTileSize = 4096;
  static constexpr uint32_t kGroupSize = 128;
  static constexpr uint32_t kGroupsPerTile = kTileSize / kGroupSize;
  static constexpr uint32_t kMaxTiles = 128;  // 2^19 elements
  static constexpr uint32_t kMaxGroups = kMaxTiles * kGroupsPerTile;

  FLASHINFER_HOST_DEVICE static constexpr uint32_t num_tiles(uint32_t vocab_size) {
    return ceil_div(vocab_size, kTileSize);
  }
};

// Where a top-p draw of a row stands.
struct DrawState {
  uint64_t total;  // weight of the row
  float max;       // of the row
  float pivot;     // value of the token
  uint32_t token;
  uint32_t is_settled;
};

// Whether a configuration runs in passes over tiles, which leave statistics in a workspace.
constexpr bool samples_by_stream(SamplingFilter filter, SamplingOutput output) {
  if (filter == SamplingFilter::kNone) return true;
  return output == SamplingOutput::kToken && filter != SamplingFilter::kMinP;
}

// Bytes of the workspace: the tiles' statistics of all input rows, then for top-k the groups'
// maxima, for top-p a state and the tiles' sums of each output row.
constexpr uint64_t workspace_bytes(SamplingFilter filter, uint64_t num_input_rows,
                                   uint64_t num_rows, uint32_t vocab_size) {
  const uint64_t num_tiles = StreamLayout::num_tiles(vocab_size);
  uint64_t bytes = num_input_rows * num_tiles * sizeof(TileStat);
  if (filter == SamplingFilter::kTopP) {
    bytes += num_rows * (sizeof(DrawState) + num_tiles * sizeof(uint64_t));
  } else if (filter != SamplingFilter::kNone) {
    bytes += num_input_rows * num_tiles * StreamLayout::kGroupsPerTile * sizeof(float);
  }
  return bytes;
}

struct SamplingParams {
  const void* input;  // [num_input_rows, vocab_size] logits or weights, last dimension contiguous
  int64_t input_stride;  // elements
  void* out;             // kToken: [num_rows] int32 or int64; else [num_rows, vocab_size]
  int64_t out_stride;    // elements; not for kToken
  uint8_t* valid;  // [num_rows] bool, nullable: whether the row had a distribution to draw from
  const void* indices;        // [num_rows] int32 or int64, nullable: input row of each output row
  PerRow<float> temperature;  // logits are divided by it; by input row
  PerRow<int32_t> top_k;      // by input row; less than 1, or at least vocab_size: no limit
  PerRow<float> top_p;        // by input row
  PerRow<float> min_p;        // by input row
  PerRow<uint64_t> seed;      // by output row, [1] if shared
  PerRow<uint64_t> offset;    // by output row, [1] if shared
  uint32_t num_rows;
  int64_t first_row;  // of a launch that takes a part of the rows; set by it
  uint32_t num_input_rows;
  uint32_t vocab_size;
  bool indices_are_64bit;
  bool tokens_are_64bit;
  bool seed_is_shared;    // one seed for all rows: rows then draw from different random streams
  bool offset_is_shared;  // one offset for all rows
  void* workspace;        // of draws by stream.cuh: see StreamLayout
  uint32_t max_cluster;   // CTAs per row; 0: no limit but the device's
  uint32_t max_vecs;      // vectors of a row that a CTA has shared memory for; set by the launch
};

}  // namespace flashinfer
