// Draws by the sums of tiles, and settles a token of the octave half where the nucleus ends
// (nucleus.cuh): lists the half's elements, then accepts or replaces the token.
#pragma once

#include <flashinfer/sampling/top_p/sums.cuh>

namespace flashinfer {

namespace detail {

// Draws from the elements that are at least `threshold`, whose weight per tile is in
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
  // The tile's own unit is smaller in proportion to its largest element.
  const float max = storage.tile_maxima[tile];
  draw_from_tile(row, params.vocab_size, tile, ProbWeight(max, 1.f), threshold,
                 target << ((top - upper_half_of(max)) / 2), storage.warp_values,
                 [&](uint32_t token, float value) {
                   storage.token = token;
                   storage.value = value;
                 });
}

// A list in global memory that CTAs append to.
struct GlobalList {
  uint32_t* size;
  uint32_t* entries;

  __device__ __forceinline__ uint32_t reserve(uint32_t count) const {
    return atomicAdd(size, count);
  }
  __device__ __forceinline__ void store(uint32_t slot, uint32_t entry) const {
    entries[slot] = entry;
  }
};

// A list in the shared memory of the first CTA of a cluster.
struct ClusterList {
  uint32_t size, entries;

  __device__ __forceinline__ ClusterList(const uint32_t* own_size, const uint32_t* own_entries)
      : size(ptx::cluster_address(own_size, 0)), entries(ptx::cluster_address(own_entries, 0)) {}

  __device__ __forceinline__ uint32_t reserve(uint32_t count) const {
    return ptx::cluster_add(size, count);
  }
  __device__ __forceinline__ void store(uint32_t slot, uint32_t entry) const {
    ptx::cluster_store(entries + 4 * slot, entry);
  }
};

// Appends the elements of one half to a list, as mantissa << 7 | tile. `x` holds the elements of a
// thread, kPerTile from each of consecutive tiles.
template <int kPerTile, int N, typename List>
__device__ __forceinline__ void append_half(const float (&x)[N], uint32_t half, uint32_t tile,
                                            const List& list) {
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
  if (threadIdx.x % 32 == 31) base = list.reserve(inclusive);
  uint32_t slot = __shfl_sync(0xffffffffu, base, 31) + inclusive - mine;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (!(mask >> j & 1)) continue;
    if (slot < NucleusLayout::kCapacity) {
      list.store(slot, mantissa_of(x[j]) << 7 | (tile + j / kPerTile));
    }
    ++slot;
  }
}

// Loads the elements of `kTiles` tiles that belong to this thread of kThreads.
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

// The largest listed mantissa m for which the mantissas that are at least m sum to `needed`; 0 if
// none. The range where the sum is crossed is cut again and again, until it is one number or its
// entries are few enough to be compared in pairs.
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

// Accepts or replaces a token of the pivot. `list` holds the pivot's elements and is complete if
// there are at most kCapacity. 512 threads.
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
  // Used only if the token is replaced; fetched now, because the trip to memory takes longer than
  // the sum.
  RowHalves halves;
  halves.load(storage, workspace, input_row, workspace.num_tiles);
  const bool is_complete = list_size <= NucleusLayout::kCapacity;
  if (is_complete) {
    // The token is in the nucleus if the larger elements do not reach its end.
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
    // Falls back to the exact search of row/select.cuh.
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

}  // namespace flashinfer
