// Top-p draws from probabilities, which read the rows once.
//
// The weights of a tile are added up per octave half (the values with one exponent and one first
// digit): exact integers. The sums of a row tell in which half the nucleus ends, the pivot. All
// halves above it are in the nucleus, none below it is. A token is drawn from the halves down to
// the pivot, and is accepted at once if it lies above the pivot. Only a token of the pivot itself
// needs the exact end of the nucleus: then the pivot's elements are listed. A token that is not in
// the nucleus is replaced by one drawn from just the nucleus. So there are at most two draws, and
// whatever comes out is distributed as the nucleus is.
//
//   halves kernel    sums per tile and half                                        reads the rows
//   propose kernel   a CTA per row: pivot and token                            reads a tile of each
//   list kernel      the pivot's elements, of the rows whose token is in it      reads those rows
//   settle kernel    accepts or replaces the tokens of these rows
//
// With few rows, or very many, the propose kernel does alone what the last two do.
#pragma once

#include <flashinfer/sampling/stream.cuh>

#ifndef __CUDACC_RTC__
#include <algorithm>
#endif

namespace flashinfer {

namespace detail {

// Number of the half that a value belongs to: twice its exponent, and its first digit behind the
// point. Zeros and denormals belong to the least one.
__device__ __forceinline__ uint32_t half_of(float x) {
  return max((__float_as_uint(x) & 0x7fffffffu) >> 22, 2u);
}

// A value is mantissa * 2^(half / 2 - 150).
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

}  // namespace detail

#ifndef HALVES_THREADS
#define HALVES_THREADS 128
#endif
inline constexpr int kHalvesThreads = HALVES_THREADS;

// Grid (tiles, input rows from first_row on), kHalvesThreads threads.
template <typename Traits>
__global__ void __launch_bounds__(kHalvesThreads)
    halves_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  constexpr int kThreads = kHalvesThreads, kVecSize = 16 / sizeof(T);
  constexpr int kVecs = StreamLayout::kTileSize / kThreads / kVecSize;
  constexpr uint32_t kHalves = NucleusLayout::kHalves;
  // A column per lane: no two lanes of a warp meet. 256 mantissas of 24 bits fit a sum.
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
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      const float value = fmaxf(x[i][j], 0.f);
      // What is too small for the last half is counted in its units.
      const uint32_t depth = top - detail::half_of(value), half = min(depth, kHalves - 1);
      atomicAdd(&sums[half][lane_idx],
                detail::mantissa_of(value) >> min(depth / 2 - half / 2, 31u));
    }
  }
  __syncthreads();
  // Some threads to a half; each begins at another bank.
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

// Shared memory of the kernels of one CTA per row.
struct NucleusStorage {
  static constexpr uint32_t kWarps = 16;
  static constexpr uint32_t kNumBins = 1024;
  static constexpr uint32_t kMaxRanked = 128;

  union {
    struct {
      uint32_t counts[kNumBins];   // of mantissas
      uint32_t offsets[kNumBins];  // sum of their distances from the bin's largest
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

// In units of the row's weights: of the largest's mantissa, twenty binary places are kept. `depth`
// in halves below the upper one of the largest.
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
  uint32_t depths[kPerWarp];  // of the upper half; of a warp's last tiles kNoTile
  float max;                  // of the row; NaN if it has one
  uint32_t top;               // upper half of the largest element

  // The tiles' maxima are in `storage` after the next barrier.
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
    // A tile that has no positive element may have an exponent of its own.
#pragma unroll
    for (uint32_t i = 0; i < kPerWarp; ++i) {
      depths[i] = depths[i] == 0 ? kNoTile : top - min(depths[i], top) + 2 * lane_idx;
    }
  }

  // Weights of the row's halves 2 l and 2 l + 1, and of all that is deeper. Contains a barrier.
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

  // Writes the weight that each tile has in the halves less deep than `end`.
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

// Draws from the elements of at least `threshold`, whose weight per tile is in
// storage.tile_weights. The token and its value are in `storage` after the next barrier.
template <typename T>
__device__ __forceinline__ void draw_by_tiles(NucleusStorage& storage, const SamplingParams& params,
                                              const T* row, uint32_t top, float threshold,
                                              uint64_t bits) {
  const uint32_t lane_idx = threadIdx.x % 32;
  constexpr int kPerLane = StreamLayout::kMaxTiles / 32;
  uint64_t total = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) total += storage.tile_weights[lane_idx + 32 * i];
  uint64_t target = __umul64hi(bits, warp_sum_u64(total));
  uint32_t tile = 0;
#pragma unroll 1
  for (int i = 0; i < kPerLane; ++i) {
    const uint64_t weight = storage.tile_weights[lane_idx + 32 * i];
    const uint64_t inclusive = warp_inclusive_sum(weight);
    const uint32_t passed = __ballot_sync(0xffffffffu, inclusive > target);
    if (passed) {
      const int lane = __ffs(static_cast<int>(passed)) - 1;
      tile = 32 * i + lane;
      target -= __shfl_sync(0xffffffffu, inclusive - weight, lane);
      break;
    }
    target -= __shfl_sync(0xffffffffu, inclusive, 31);
  }
  // The tile's own unit is as much smaller as its largest element is.
  const float max = storage.tile_maxima[tile];
  draw_from_tile(row, params.vocab_size, tile, ProbWeight(max, 1.f), threshold,
                 target << ((top - upper_half_of(max)) / 2), storage.warp_values,
                 [&](uint32_t token, float value) {
                   storage.token = token;
                   storage.value = value;
                 });
}

// Appends the elements of one half to a list, as mantissa << 7 | tile; `x` are those of a
// thread, kPerTile of each of consecutive tiles.
template <int kPerTile, int N>
__device__ __forceinline__ void append_half(const float (&x)[N], uint32_t half, uint32_t tile,
                                            uint32_t* count, uint32_t* list) {
  static_assert(N <= 32 && StreamLayout::kMaxTiles <= 128);
  uint32_t mask = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    mask |= static_cast<uint32_t>(x[j] > 0.f && half_of(x[j]) == half) << j;
  }
  const auto mine = static_cast<uint32_t>(__popc(mask));
  if (!__any_sync(0xffffffffu, mine)) return;
  const auto inclusive = static_cast<uint32_t>(warp_inclusive_sum(mine));
  uint32_t base = 0;
  if (threadIdx.x % 32 == 31) base = atomicAdd(count, inclusive);
  uint32_t slot = __shfl_sync(0xffffffffu, base, 31) + inclusive - mine;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (!(mask >> j & 1)) continue;
    if (slot < NucleusLayout::kCapacity)
      list[slot] = mantissa_of(x[j]) << 7 | (tile + j / kPerTile);
    ++slot;
  }
}

// The elements of `kTiles` tiles that belong to a thread of kThreads.
template <int kTiles, int kThreads, typename T, int N>
__device__ __forceinline__ void load_tiles(const T* row, uint32_t size, uint32_t tile,
                                           float (&x)[N]) {
  constexpr int kVecSize = 16 / sizeof(T), kPerTile = N / kTiles;
  static_assert(kPerTile * kThreads == StreamLayout::kTileSize && kPerTile % kVecSize == 0);
  const bool aligned = row_is_aligned(row);
#pragma unroll
  for (int i = 0; i < N / kVecSize; ++i) {
    float vec[kVecSize];
    const uint32_t first = (tile + i * kVecSize / kPerTile) * StreamLayout::kTileSize +
                           i * kVecSize % kPerTile * kThreads + threadIdx.x * kVecSize;
    load_elements(row, aligned, size, first, vec);
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) x[i * kVecSize + j] = vec[j];
  }
}

// The largest listed mantissa from which on the sum reaches `needed`, 0 if none. Cut into ranges,
// of which the one where the sum is crossed is cut again, until a range is one number or its
// entries are few enough to be compared with each other.
template <int N>
__device__ __forceinline__ uint32_t select_mantissa(NucleusStorage& storage,
                                                    const uint32_t (&entries)[N], uint64_t needed) {
  uint32_t high = (1u << 24) - 1;
  uint64_t above = 0;
#pragma unroll 1
  for (uint32_t shift : {14u, 4u, 0u}) {
    for (uint32_t i = threadIdx.x; i < NucleusStorage::kNumBins; i += blockDim.x) {
      storage.counts[i] = storage.offsets[i] = 0;
    }
    if (threadIdx.x == 0) {
      storage.bin = NucleusStorage::kNumBins;
      storage.list_size = storage.least = 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t mantissa = entries[i] >> 7, distance = high - mantissa;
      const uint32_t bin = distance >> shift;
      if (mantissa == 0 || mantissa > high || bin >= NucleusStorage::kNumBins) continue;
      atomicAdd(&storage.counts[bin], 1u);
      atomicAdd(&storage.offsets[bin], distance - (bin << shift));
    }
    __syncthreads();
    uint64_t sums[2];
#pragma unroll
    for (uint32_t b = 0; b < 2; ++b) {
      const uint32_t bin = 2 * threadIdx.x + b;
      sums[b] = uint64_t{storage.counts[bin]} * (high - (bin << shift)) - storage.offsets[bin];
    }
    uint64_t inclusive = warp_inclusive_sum(sums[0] + sums[1]);
    if (threadIdx.x % 32 == 31) storage.warp_values[threadIdx.x / 32] = inclusive;
    __syncthreads();
    for (uint32_t w = 0; w < threadIdx.x / 32; ++w) inclusive += storage.warp_values[w];
    inclusive += above;
    const uint64_t before = inclusive - sums[0] - sums[1];
    if (before < needed && inclusive >= needed) {
      const bool in_second = before + sums[0] < needed;
      storage.bin = 2 * threadIdx.x + in_second;
      storage.above = before + (in_second ? sums[0] : 0);
    }
    __syncthreads();
    const uint32_t bin = storage.bin;
    if (bin == NucleusStorage::kNumBins) return 0;
    high -= bin << shift;
    above = storage.above;
    if (shift == 0) return high;
    const uint32_t count = storage.counts[bin];
    if (count <= NucleusStorage::kMaxRanked) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const uint32_t mantissa = entries[i] >> 7;
        if (mantissa != 0 && high - mantissa < 1u << shift) {
          storage.ranked[atomicAdd(&storage.list_size, 1u)] = mantissa;
        }
      }
      __syncthreads();
      if (threadIdx.x < count) {
        const uint32_t mine = storage.ranked[threadIdx.x];
        uint64_t sum = above;
#pragma unroll 4
        for (uint32_t i = 0; i < count; ++i) {
          sum += storage.ranked[i] >= mine ? storage.ranked[i] : 0;
        }
        if (sum >= needed) atomicMax(&storage.least, mine);
      }
      __syncthreads();
      return storage.least;
    }
    __syncthreads();
  }
  return high;
}

// Accepts or replaces a token of the pivot. `list`: the pivot's elements, complete if there are at
// most kCapacity. 512 threads.
template <typename Traits>
__device__ __forceinline__ void settle(const SamplingParams& params, NucleusStorage& storage,
                                       const NucleusWorkspace& workspace,
                                       const NucleusLayout::Pending& pending, uint32_t list_size,
                                       const uint32_t* list) {
  using T = typename Traits::T;
  constexpr int kMine = NucleusLayout::kCapacity / 512;
  const uint32_t out_row = pending.row;
  const auto input_row = static_cast<uint32_t>(input_row_of(params, out_row));
  const T* row = static_cast<const T*>(params.input) + input_row * params.input_stride;
  uint32_t entries[kMine];
#pragma unroll
  for (uint32_t i = 0; i < kMine; ++i) {
    const uint32_t slot = threadIdx.x + 512 * i;
    entries[i] = slot < min(list_size, NucleusLayout::kCapacity) ? list[slot] : 0;
  }
  // Of use if the token is replaced; fetched now, as the trip to memory takes longer than the sum.
  RowHalves halves;
  halves.load(storage, workspace, input_row, workspace.num_tiles);
  const bool is_complete = list_size <= NucleusLayout::kCapacity;
  if (is_complete) {
    // It is in if what is larger does not reach the end.
    uint64_t larger = 0;
#pragma unroll
    for (uint32_t i = 0; i < kMine; ++i) {
      larger += entries[i] >> 7 > mantissa_of(pending.value) ? entries[i] >> 7 : 0;
    }
    larger = warp_sum_u64(larger);
    __syncthreads();
    if (threadIdx.x % 32 == 0) storage.warp_values[threadIdx.x / 32] = larger;
    __syncthreads();
    larger = 0;
#pragma unroll
    for (uint32_t w = 0; w < NucleusStorage::kWarps; ++w) larger += storage.warp_values[w];
    if (larger < pending.needed) {
      if (threadIdx.x == 0) write_token(params, out_row, pending.token);
      return;
    }
    __syncthreads();
  }

  const uint64_t bits = row_bits(params, out_row, 1);
  if (!is_complete) {
    // The exact search of select.cuh.
    const ProbWeight weight(halves.max, 1.f);
    RowCluster<T, false> whole(row, params.vocab_size, nullptr, 0, storage.warp_values);
    const RowMaxima all{halves.max, negative_infinity(), negative_infinity()};
    const float threshold =
        find_threshold<Traits>(whole, storage.select, all, weight, 0, params.top_p[input_row], 0.f);
    if (pending.value >= threshold) {
      if (threadIdx.x == 0) write_token(params, out_row, pending.token);
    } else {
      draw_from_row(params, whole, weight, threshold, bits, out_row);
    }
    return;
  }
  const uint32_t least = select_mantissa(storage, entries, pending.needed);
  for (uint32_t i = threadIdx.x; i < StreamLayout::kMaxTiles; i += blockDim.x) {
    storage.pivot_sums[i] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const uint32_t mantissa = entries[i] >> 7;
    if (mantissa != 0 && mantissa >= least) {
      add_with_carry(&storage.pivot_sums[entries[i] & 127], mantissa);
    }
  }
  const uint32_t depth = halves.top - pending.half;
  halves.add_up_tiles(storage, depth);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < StreamLayout::kMaxTiles; i += blockDim.x) {
    storage.tile_weights[i] += to_units(storage.pivot_sums[i], depth);
  }
  __syncthreads();
  draw_by_tiles(storage, params, row, halves.top, compose(pending.half, least), bits);
  __syncthreads();
  if (threadIdx.x == 0) write_token(params, out_row, storage.token);
}

}  // namespace detail

// Grid: output rows; 512 threads. Dynamic shared memory with kAlone: the row's list.
template <typename Traits, bool kAlone>
__global__ void __launch_bounds__(512, kAlone ? 1 : 2)
    propose_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  __shared__ NucleusStorage storage;
  if (threadIdx.x == 0) storage.list_size = 0;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const detail::NucleusWorkspace workspace(params);
  const uint32_t out_row = blockIdx.x;
  const uint64_t input_row = detail::input_row_of(params, out_row);
  const bool exists = input_row < params.num_input_rows;
  const float p = params.top_p[exists ? static_cast<uint32_t>(input_row) : 0];
  detail::RowHalves halves;
  halves.load(storage, workspace, exists ? input_row : 0, exists ? workspace.num_tiles : 0);
  const uint64_t bits = detail::row_bits(params, out_row);
  const bool valid = detail::has_distribution<false>(halves.max) && p == p;
  if (threadIdx.x == 0) {
    if (params.valid) params.valid[out_row] = valid;
    if (!valid) detail::write_token(params, out_row, 0);
  }
  if (!valid) return;

  // The first half, from the largest element's octave on, with which the target is reached.
  uint64_t deeper;
  const ulonglong2 weights = halves.add_up(storage, &deeper);
  const uint64_t inclusive = warp_inclusive_sum(weights.x + weights.y);
  const uint64_t total = __shfl_sync(0xffffffffu, inclusive, 31) + deeper;
  const uint64_t wanted = detail::top_p_target(p, total);
  const uint32_t reached = __ballot_sync(0xffffffffu, inclusive >= wanted);
  const uint32_t octave = reached ? __ffs(static_cast<int>(reached)) - 1 : 31;
  uint64_t before = __shfl_sync(0xffffffffu, inclusive - weights.x - weights.y, octave);
  const uint64_t upper = __shfl_sync(0xffffffffu, weights.x, octave);
  const bool is_lower = before + upper < wanted;
  if (is_lower) before += upper;
  const uint32_t depth = 2 * octave + is_lower;
  const bool keeps_all = p >= 1.f;
  // The last octave of a tile has all that is deeper as well.
  const bool is_too_deep = octave >= 31 || depth + 2 > halves.top;

  const T* row = static_cast<const T*>(params.input) + input_row * params.input_stride;
  NucleusLayout::Pending pending{};
  pending.row = out_row;
  pending.value = negative_infinity();  // less than any threshold
  if (keeps_all || !is_too_deep) {
    pending.half = halves.top - depth;
    halves.add_up_tiles(storage, keeps_all ? 0xffffffffu : depth + 1);
    __syncthreads();
    // The least half begins at 0.
    const float floor = keeps_all          ? negative_infinity()
                        : pending.half > 2 ? __uint_as_float(pending.half << 22)
                                           : 0.f;
    detail::draw_by_tiles(storage, params, row, halves.top, floor, bits);
    __syncthreads();
    pending.token = storage.token;
    pending.value = storage.value;
    if (keeps_all || detail::half_of(pending.value) > pending.half) {
      if (threadIdx.x == 0) detail::write_token(params, out_row, pending.token);
      return;
    }
    // In mantissas of the pivot.
    const uint64_t left = wanted - before;
    pending.needed = octave <= 20 ? (left + (uint64_t{1} << (20 - octave)) - 1) >> (20 - octave)
                                  : left << (octave - 20);
  }
  if constexpr (kAlone) {
    extern __shared__ uint32_t own_list[];
    constexpr int kTiles = NucleusLayout::kTilesPerList;
    uint32_t list_size = NucleusLayout::kCapacity + 1;
    if (!is_too_deep) {
      float x[kTiles * StreamLayout::kTileSize / 512];
#pragma unroll 1
      for (uint32_t tile = 0; tile < workspace.num_tiles; tile += kTiles) {
        detail::load_tiles<kTiles, 512>(row, params.vocab_size, tile, x);
        detail::append_half<StreamLayout::kTileSize / 512>(x, pending.half, tile,
                                                           &storage.list_size, own_list);
      }
      __syncthreads();
      list_size = storage.list_size;
      __syncthreads();
    }
    detail::settle<Traits>(params, storage, workspace, pending, list_size, own_list);
  } else if (threadIdx.x == 0) {
    pending.list_size = is_too_deep ? NucleusLayout::kCapacity + 1 : 0;
    workspace.pending[atomicAdd(workspace.num_pending, 1u)] = pending;
  }
}

// Grid (groups of tiles, any number of rows at a time), 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512)
    list_pivot_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  constexpr int kPerTile = StreamLayout::kTileSize / 512, kTiles = NucleusLayout::kTilesPerList;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const detail::NucleusWorkspace workspace(params);
  // The first entry is fetched before it is known to be one.
  NucleusLayout::Pending pending = workspace.pending[blockIdx.y];
  const uint32_t num_pending = *workspace.num_pending;
  for (uint32_t i = blockIdx.y; i < num_pending; i += gridDim.y) {
    if (i != blockIdx.y) pending = workspace.pending[i];
    const T* row = static_cast<const T*>(params.input) +
                   detail::input_row_of(params, pending.row) * params.input_stride;
    float x[kTiles * kPerTile];
    detail::load_tiles<kTiles, 512>(row, params.vocab_size, blockIdx.x * kTiles, x);
    detail::append_half<kPerTile>(x, pending.half, blockIdx.x * kTiles,
                                  &workspace.pending[i].list_size, workspace.list(i));
  }
}

// Grid: any number of rows at a time; 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512, 1)
    settle_kernel(const __grid_constant__ SamplingParams params) {
  __shared__ NucleusStorage storage;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const detail::NucleusWorkspace workspace(params);
  NucleusLayout::Pending pending = workspace.pending[blockIdx.x];
  const uint32_t num_pending = *workspace.num_pending;
  for (uint32_t i = blockIdx.x; i < num_pending; i += gridDim.x) {
    if (i != blockIdx.x) pending = workspace.pending[i];
    detail::settle<Traits>(params, storage, workspace, pending, pending.list_size,
                           workspace.list(i));
    __syncthreads();
  }
}

#ifndef __CUDACC_RTC__

template <typename Traits>
inline cudaError_t launch_nucleus_sampling(const SamplingParams& params, bool enable_pdl,
                                           cudaStream_t stream) {
  cudaError_t status = launch_tiles(halves_kernel<Traits>, kHalvesThreads, params.num_input_rows,
                                    params, enable_pdl, stream);
  const dim3 rows(params.num_rows), threads(512);
  if (status != cudaSuccess) return status;
  if (!NucleusLayout::lists_pending(params.num_rows) || params.num_input_rows == 0) {
    constexpr size_t kListBytes = NucleusLayout::kCapacity * sizeof(uint32_t);
    return launch_kernel(propose_kernel<Traits, true>, rows, threads, kListBytes, stream,
                         enable_pdl, params);
  }
  status =
      launch_kernel(propose_kernel<Traits, false>, rows, threads, 0, stream, enable_pdl, params);
  // CTAs that find nothing to do cost time as well: about one for each multiprocessor.
  constexpr uint32_t kMaxLists = 128, kMaxSettled = 128;
  if (status == cudaSuccess) {
    const uint32_t groups =
        ceil_div(StreamLayout::num_tiles(params.vocab_size), NucleusLayout::kTilesPerList);
    const dim3 grid(groups, std::min(params.num_rows, ceil_div(kMaxLists, groups)));
    status = launch_kernel(list_pivot_kernel<Traits>, grid, threads, 0, stream, enable_pdl, params);
  }
  if (status == cudaSuccess) {
    status = launch_kernel(settle_kernel<Traits>, dim3(std::min(params.num_rows, kMaxSettled)),
                           threads, 0, stream, enable_pdl, params);
  }
  return status;
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
