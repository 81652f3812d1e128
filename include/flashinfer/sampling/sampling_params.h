// Arguments of the sampling kernels. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/common/math.cuh>

namespace flashinfer {

// One number for all rows, or one per row.
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
  kTopKTopP,       // top-k, then top-p of the elements that remain
  kTopKTopPJoint,  // both on the whole row
};

enum class SamplingOutput {
  kToken,  // one index per row, drawn from the kept set
  kProbs,  // weights of the kept set divided by their sum; zero elsewhere
  kMask,   // the input where it is kept, -inf elsewhere
};

// Statistics that the first pass of a draw (draw/stream.cuh) stores per tile.
struct TileStat {
  uint64_t sum;  // sum of weights in the units of the tile's maximum
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

// Sizes of top-p draws from probabilities (top_p/nucleus.cuh).
struct NucleusLayout {
  // Octave halves per tile, from its largest element's octave on.
  static constexpr uint32_t kHalves = 64;
  static constexpr uint32_t kCapacity = 8192;   // elements of a row's list
  static constexpr uint32_t kTilesPerList = 4;  // tiles that a CTA of 512 threads searches at once

  // A row whose token must be compared with the end of the nucleus.
  struct Pending {
    uint64_t needed;  // sum of mantissas at which the nucleus ends
    uint32_t half;    // the octave half where it ends
    uint32_t token;
    float value;  // of the token
    uint32_t list_size;
    uint32_t row;
    uint32_t padding;
  };

  // Whether separate kernels process pending rows. That pays if some rows of a batch are pending,
  // which a single row seldom is. Very many rows would need too large a workspace.
  FLASHINFER_HOST_DEVICE static constexpr bool lists_pending(uint64_t num_rows) {
    return num_rows >= 8 && num_rows <= 1024;
  }
};

// Whether a configuration runs in passes over tiles, which leave statistics in a workspace.
constexpr bool samples_by_stream(SamplingFilter filter, SamplingOutput output, bool logits) {
  if (filter == SamplingFilter::kNone) return true;
  if (filter == SamplingFilter::kTopP && logits) return false;
  return output == SamplingOutput::kToken && filter != SamplingFilter::kMinP;
}

// Bytes of the workspace of a configuration that runs by stream. Top-p stores the sums of the
// tiles' halves, their maxima, and a state and a list per row. Others store the tiles' statistics
// of all input rows and, for top-k, the groups' maxima.
constexpr uint64_t workspace_bytes(SamplingFilter filter, uint64_t num_input_rows,
                                   uint64_t num_rows, uint32_t vocab_size) {
  const uint64_t num_tiles = num_input_rows * StreamLayout::num_tiles(vocab_size);
  if (filter == SamplingFilter::kTopP) {
    const uint64_t num_pending = NucleusLayout::lists_pending(num_rows) ? num_rows : 0;
    return 16 + num_tiles * (NucleusLayout::kHalves * sizeof(uint64_t) + sizeof(float)) +
           num_pending *
               (sizeof(NucleusLayout::Pending) + NucleusLayout::kCapacity * sizeof(uint32_t));
  }
  uint64_t bytes = num_tiles * sizeof(TileStat);
  if (filter != SamplingFilter::kNone) {
    bytes += num_tiles * StreamLayout::kGroupsPerTile * sizeof(float);
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
  int64_t first_row;  // first row of a launch that takes a part of the rows; set by the launch
  uint32_t num_input_rows;
  uint32_t vocab_size;
  bool indices_are_64bit;
  bool tokens_are_64bit;
  bool seed_is_shared;     // one seed for all rows
  bool offset_is_shared;   // one offset for all rows
  bool rows_have_streams;  // a row's number chooses its random stream; else all rows use stream 0
  void* workspace;         // for draws by draw/stream.cuh: see StreamLayout
  uint32_t paced_rows;     // softmax by clusters: rows that start in turn; set by the launch
  uint32_t pace;           // clock cycles between them
  uint32_t early_rows;     // rows that are fetched to L2 before the preceding grid ends
  uint32_t kept_rows;      // rows whose output stays in L2
  uint32_t max_cluster;    // CTAs per row; 0: only the device limits them
  uint32_t max_vecs;       // vectors of a row that fit in a CTA's shared memory; set by the launch
};

}  // namespace flashinfer
