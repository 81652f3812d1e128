// First pass of a top-p draw (nucleus.cuh): exact integer sums of weights per tile and octave half.
//
// Measurements, also of what lost: docs/tuning/sampling.md.
#pragma once

#include <flashinfer/sampling/row/tiles.cuh>

namespace flashinfer {

namespace detail {

// Number of the half that a value belongs to: twice its exponent plus its first digit after the
// binary point. Zeros and denormals belong to the lowest half.
__device__ __forceinline__ uint32_t half_of(float x) {
  return max((__float_as_uint(x) & 0x7fffffffu) >> 22, 2u);
}

// The smallest value of a half; 0 for the lowest half.
__device__ __forceinline__ float half_start(uint32_t half) {
  return half > 2 ? __uint_as_float(half << 22) : 0.f;
}

// A value equals mantissa * 2^(half / 2 - 150).
__device__ __forceinline__ uint32_t mantissa_of(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 1u << 23 ? bits : (bits & 0x7fffffu) | 1u << 23;
}

__device__ __forceinline__ float compose(uint32_t half, uint32_t mantissa) {
  return __uint_as_float(((half / 2 - 1) << 23) + mantissa);
}

// The upper half with the same exponent as x.
__device__ __forceinline__ uint32_t upper_half_of(float x) { return half_of(x) | 1; }

struct NucleusWorkspace {
  uint32_t* num_pending;            // [4], the first is in use
  uint64_t* halves;                 // [num_input_rows, num_tiles, kHalves]
  NucleusLayout::Pending* pending;  // [num_rows], in any order
  uint32_t* lists;                  // [num_rows, kCapacity]
  float* maxima;                    // [num_input_rows, num_tiles]
  uint32_t num_tiles;

  __device__ __forceinline__ NucleusWorkspace(const SamplingParams& params)
      : num_tiles(StreamLayout::num_tiles(params.vocab_size)) {
    const uint64_t num_stats = uint64_t{params.num_input_rows} * num_tiles;
    const uint64_t max_pending =
        NucleusLayout::lists_pending(params.num_rows) ? params.num_rows : 0;
    num_pending = static_cast<uint32_t*>(params.workspace);
    halves = reinterpret_cast<uint64_t*>(num_pending + 4);
    pending =
        reinterpret_cast<NucleusLayout::Pending*>(halves + num_stats * NucleusLayout::kHalves);
    lists = reinterpret_cast<uint32_t*>(pending + max_pending);
    maxima = reinterpret_cast<float*>(lists + max_pending * NucleusLayout::kCapacity);
  }

  __device__ __forceinline__ uint32_t* list(uint32_t i) const {
    return lists + uint64_t{i} * NucleusLayout::kCapacity;
  }
};

// Adds the elements of a tile whose largest element is in the octave of `top`.
template <int N>
__device__ __forceinline__ void add_to_halves(uint32_t (&sums)[NucleusLayout::kHalves][32],
                                              uint32_t top, const float (&x)[N]) {
  constexpr uint32_t kHalves = NucleusLayout::kHalves;
  uint32_t* column = &sums[0][threadIdx.x % 32];
  // Values from `least` on are not denormal, and their half has its own sum. Compared as integers,
  // negative values are smaller, too.
  const auto least = static_cast<int32_t>((top > kHalves ? top - kHalves + 1 : 2u) << 22);
  int32_t smallest = __float_as_int(x[0]);
#pragma unroll
  for (int j = 1; j < N; ++j) smallest = min(smallest, __float_as_int(x[j]));
  if (smallest >= least) {
    // This path takes a third of the instructions of the general one.
    static_assert(sizeof(sums[0]) == 128);
    char* half_0 = reinterpret_cast<char*>(column) + 128 * top;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const uint32_t bits = __float_as_uint(x[j]);
      atomicAdd(reinterpret_cast<uint32_t*>(half_0 - (bits >> 15 & ~127u)),
                (bits & 0x7fffffu) | 1u << 23);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float value = fmaxf(x[j], 0.f);
    // Values too small for the last half are counted in its units.
    const uint32_t depth = top - half_of(value), half = min(depth, kHalves - 1);
    atomicAdd(column + 32 * half, mantissa_of(value) >> min(depth / 2 - half / 2, 31u));
  }
}

}  // namespace detail

// The thread count that is fastest for 64 and for 256 rows.
inline constexpr int kHalvesThreads = 128;

// Grid (tiles, input rows from first_row on), kHalvesThreads threads.
template <typename Traits>
__global__ void __launch_bounds__(kHalvesThreads)
    halves_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  constexpr int kThreads = kHalvesThreads, kVecSize = 16 / sizeof(T);
  constexpr int kVecs = StreamLayout::kTileSize / kThreads / kVecSize;
  constexpr uint32_t kHalves = NucleusLayout::kHalves;
  // Each lane has its own column, so lanes of a warp never collide. A sum has room for 256
  // mantissas of 24 bits.
  __shared__ __align__(16) uint32_t sums[kHalves][32];
  __shared__ float warp_max[kThreads / 32];
  for (uint32_t i = threadIdx.x; i < kHalves * 8; i += kThreads) {
    reinterpret_cast<uint4*>(sums)[i] = {0, 0, 0, 0};
  }
  const uint32_t lane_idx = threadIdx.x % 32;
  const uint32_t row_idx = static_cast<uint32_t>(params.first_row) + blockIdx.y, tile = blockIdx.x;
  const T* row = static_cast<const T*>(params.input) + row_idx * params.input_stride;
  const bool aligned = detail::row_is_aligned(row);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  float x[kVecs][kVecSize];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t vec = i * kThreads + threadIdx.x;
    detail::load_elements(row, aligned, params.vocab_size,
                          tile * StreamLayout::kTileSize + vec * kVecSize, x[i]);
  }
  float max = negative_infinity();
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) max = detail::max_nan(max, x[i][j]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    max = detail::max_nan(max, __shfl_xor_sync(0xffffffffu, max, offset));
  }
  if (lane_idx == 0) warp_max[threadIdx.x / 32] = max;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) max = detail::max_nan(max, warp_max[w]);

  const uint32_t top = detail::upper_half_of(max);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) detail::add_to_halves(sums, top, x[i]);
  __syncthreads();
  // Several threads share a half; each starts at a different bank.
  constexpr uint32_t kShare = kThreads / kHalves, kColumns = 32 / kShare;
  const uint32_t half = threadIdx.x / kShare, column = threadIdx.x % kShare * kColumns;
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t j = 0; j < kColumns; ++j) sum += sums[half][column + (j + half) % kColumns];
#pragma unroll
  for (uint32_t offset = 1; offset < kShare; offset *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  const detail::NucleusWorkspace workspace(params);
  const uint64_t stat = uint64_t{row_idx} * workspace.num_tiles + tile;
  if (threadIdx.x % kShare == 0) workspace.halves[stat * kHalves + half] = sum;
  if (threadIdx.x == 0) {
    workspace.maxima[stat] = max;
    if (stat == 0) *workspace.num_pending = 0;
  }
}

// Shared memory of the kernels with one CTA per row.
struct NucleusStorage {
  static constexpr uint32_t kWarps = 16;
  static constexpr uint32_t kNumBins = 1024;
  static constexpr uint32_t kMaxRanked = 128;

  union {
    struct {
      uint32_t counts[kNumBins];   // of mantissas
      uint32_t offsets[kNumBins];  // sum of their distances from the bin's largest mantissa
      uint64_t pivot_sums[StreamLayout::kMaxTiles];
    };
    ulonglong2 sums[kWarps][32];  // of two halves
    SelectStorage select;
  };
  uint64_t tile_weights[StreamLayout::kMaxTiles];
  float tile_maxima[StreamLayout::kMaxTiles];
  uint64_t warp_values[2 * kWarps];
  uint64_t above;
  uint32_t bin;
  uint32_t token;
  float value;
  uint32_t list_size;
  uint32_t ranked[kMaxRanked];
  uint32_t least;
};

namespace detail {

// Converts mantissas to the units of the row's weights, which keep twenty binary places of the
// largest element's mantissa. `depth` counts halves below the upper half of the largest element.
__device__ __forceinline__ uint64_t to_units(uint64_t mantissas, uint32_t depth) {
  const uint32_t octaves = depth / 2;
  return octaves <= 20  ? mantissas << (20 - octaves)
         : octaves < 84 ? mantissas >> (octaves - 20)
                        : 0;
}

// The sums of a row, held by 512 threads: lane l of warp w has two halves, one octave, of each of
// the tiles w, w + 16, ...
struct RowHalves {
  static constexpr int kPerWarp = StreamLayout::kMaxTiles / NucleusStorage::kWarps;
  static constexpr uint32_t kNoTile = 0xffffffffu;
  ulonglong2 sums[kPerWarp];  // the upper half first
  uint32_t depths[kPerWarp];  // depth of the upper half; kNoTile for a warp's unused tiles
  float max;                  // of the row; NaN if it has one
  uint32_t top;               // upper half of the largest element

  // Loads the sums. The tiles' maxima are in `storage` after the next barrier.
  __device__ __forceinline__ void load(NucleusStorage& storage, const NucleusWorkspace& workspace,
                                       uint64_t input_row, uint32_t num_tiles) {
    const uint32_t lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    const uint64_t first = input_row * num_tiles;
    const auto* octaves =
        reinterpret_cast<const ulonglong2*>(workspace.halves + first * NucleusLayout::kHalves);
    max = negative_infinity();
#pragma unroll
    for (uint32_t i = 0; i < StreamLayout::kMaxTiles / 32; ++i) {
      const uint32_t tile = lane_idx + 32 * i;
      const float tile_max =
          tile < num_tiles ? workspace.maxima[first + tile] : negative_infinity();
      if (warp_idx == 0) storage.tile_maxima[tile] = tile_max;
      max = max_nan(max, tile_max);
    }
#pragma unroll
    for (uint32_t i = 0; i < kPerWarp; ++i) {
      const uint32_t tile = warp_idx + NucleusStorage::kWarps * i;
      sums[i] = {0, 0};
      depths[i] = 0;
      if (tile < num_tiles) {
        sums[i] = octaves[tile * 32 + lane_idx];
        depths[i] = upper_half_of(workspace.maxima[first + tile]);
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      max = max_nan(max, __shfl_xor_sync(0xffffffffu, max, offset));
    }
    top = upper_half_of(max);
    // A tile without a positive element may have an arbitrary exponent.
#pragma unroll
    for (uint32_t i = 0; i < kPerWarp; ++i) {
      depths[i] = depths[i] == 0 ? kNoTile : top - min(depths[i], top) + 2 * lane_idx;
    }
  }

  // Weights of the row's halves 2 l and 2 l + 1, and of everything deeper. Contains a barrier.
  __device__ __forceinline__ ulonglong2 add_up(NucleusStorage& storage, uint64_t* deeper) const {
    const uint32_t lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    ulonglong2 sum = {0, 0};
    uint64_t rest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kPerWarp; ++i) {
      if (depths[i] == kNoTile) break;
      const uint32_t shift = depths[i] / 2 - lane_idx, from = (lane_idx - shift) % 32;
      const uint64_t upper = __shfl_sync(0xffffffffu, sums[i].x, from);
      const uint64_t lower = __shfl_sync(0xffffffffu, sums[i].y, from);
      if (lane_idx >= shift) {
        sum.x += upper;
        sum.y += lower;
      }
      if (depths[i] >= NucleusLayout::kHalves) rest += to_units(sums[i].x + sums[i].y, depths[i]);
    }
    storage.sums[warp_idx][lane_idx] = sum;
    rest = warp_sum_u64(rest);
    if (lane_idx == 0) storage.warp_values[warp_idx] = rest;
    __syncthreads();
    sum = {0, 0};
    *deeper = 0;
#pragma unroll
    for (uint32_t w = 0; w < NucleusStorage::kWarps; ++w) {
      const ulonglong2 part = storage.sums[w][lane_idx];
      sum.x += part.x;
      sum.y += part.y;
      *deeper += storage.warp_values[w];
    }
    return {to_units(sum.x, 2 * lane_idx), to_units(sum.y, 2 * lane_idx)};
  }

  // Writes each tile's weight in the halves above depth `end`.
  __device__ __forceinline__ void add_up_tiles(NucleusStorage& storage, uint32_t end) const {
#pragma unroll
    for (uint32_t i = 0; i < kPerWarp; ++i) {
      uint64_t sum = 0;
      if (depths[i] != kNoTile) {
        if (depths[i] < end) sum = to_units(sums[i].x, depths[i]);
        if (depths[i] + 1 < end) sum += to_units(sums[i].y, depths[i]);
        sum = warp_sum_u64(sum);
      }
      if (threadIdx.x % 32 == 0) {
        storage.tile_weights[threadIdx.x / 32 + NucleusStorage::kWarps * i] = sum;
      }
    }
  }
};

}  // namespace detail

}  // namespace flashinfer
