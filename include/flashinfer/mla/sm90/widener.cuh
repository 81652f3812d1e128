// The warpgroup that feeds the others from caches of 8 bits: its four warps load KV, make float16
// of it, which represents every e4m3 value, and store it where the copy engine would. Tokens with
// scales have a widener of their own (scaled_widener.cuh).
//
// Each warp has 16 rows of a block, and loads half of their columns at a time into registers. Loads
// for the next half are asked for when all of the half at hand is stored, and not earlier: a thread
// waits for loads by few counters, so that one that is waited for would wait for younger ones.
//
// Queries become T, too: with a power of two per row, so that none is too large or too small
// for it. Logits are multiplied by its inverse.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/float8.cuh>
#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/sm90/cache_rows.cuh>
#include <flashinfer/mla/sm90/producer.cuh>
#include <flashinfer/ptx/cluster.cuh>
#include <flashinfer/ptx/global.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/prefetch.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <type_traits>

namespace flashinfer {

template <typename Tile>
class MlaWidener {
  using T = typename Tile::T;
  using Q = typename Tile::Q;
  using Kpe = typename Tile::Kpe;
  using CacheRows = MlaCacheRows<Kpe>;
  static constexpr int kWarpRows = CacheRows::kWarpRows;
  static constexpr int kHalfColumns = Tile::kDimCkv / 2;
  static constexpr int kRowLanes = kHalfColumns / 16;        // that load a half of a row
  static constexpr int kLoads = kWarpRows * kRowLanes / 32;  // of a half of the warp's rows
  // Lanes that load a row of kpe, and loads.
  static constexpr int kRopeLanes = Tile::kDimKpe * static_cast<int>(sizeof(Kpe)) / 16;
  static constexpr int kRopeLoads = kWarpRows * kRopeLanes / 32;
  // Lanes that know the same row.
  static constexpr int kSameRow = 32 / kWarpRows;

 public:
  __device__ __forceinline__ MlaWidener(const MlaParams& params, char* shared, MlaControl& control)
      : params_(params),
        control_(control),
        profile_(params, 2, kMlaProfileGroups, threadIdx.x % 128 == 0),
        shared_(ptx::shared_address(shared)) {
    warp_idx_ = threadIdx.x / 32 % Tile::kLoadWarps;
    lane_idx_ = threadIdx.x % 32;
  }

  __device__ __forceinline__ void run() {
    ptx::grid_dependency_wait();
    ptx::cluster_wait();
    const int begin = params_.cta_begin[blockIdx.x], end = params_.cta_begin[blockIdx.x + 1];
    for (int i = begin; i < end; ++i) {
      load_query(params_.items[i], (i - begin) % 2);
      profile_.begin(MlaEvent::kLoad);
      widen_blocks(params_.items[i]);
      profile_.end(MlaEvent::kLoad);
    }
  }

 private:
  template <typename U>
  __device__ __forceinline__ static uint32_t address(U& in_shared) {
    return ptx::shared_address(&in_shared);
  }

  // ---- Queries ----

  // Eight values, and as floats.
  using Eight = std::conditional_t<sizeof(Q) == 1, uint2, uint4>;
  __device__ __forceinline__ static void to_floats(const Eight& bits, float (&values)[8]) {
    if constexpr (sizeof(Q) == 1) {
      uint32_t pairs[4];
      float8_to_half2<Q>(bits.x, pairs[0], pairs[1]);
      float8_to_half2<Q>(bits.y, pairs[2], pairs[3]);
      unpack<dtype::float16>(pairs, values);
    } else {
      const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
      unpack<Q>(pairs, values);
    }
  }
  template <typename U>
  __device__ __forceinline__ static void unpack(const uint32_t (&pairs)[4], float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = to_float(U{static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16)});
    }
  }
  __device__ __forceinline__ static uint4 pack_8(const float (&values)[8], float factor) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = PackedPair<T>::pack(values[2 * i] * factor, values[2 * i + 1] * factor);
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }

  static constexpr int kQueryColumns = (Tile::kDimCkv + Tile::kDimKpe) / 8;  // of eight values
  static constexpr int kQueryPasses = ceil_div(kQueryColumns, 32);
  using QueryRow = Eight[kQueryPasses];

  // A warp has a few rows at a time, whose loads are under way together.
  __device__ __forceinline__ void load_query(const MlaWorkItem item, uint32_t parity) {
    constexpr int kTogether = 4, kWarps = Tile::kLoadWarps;
    ptx::mbarrier_wait(address(control_.q_empty), parity ^ 1);
#pragma unroll 1
    for (int first = warp_idx_; first < Tile::kRows; first += kTogether * kWarps) {
      QueryRow rows[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) read_query(item, first + i * kWarps, rows[i]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) store_query(first + i * kWarps, rows[i]);
    }
    ptx::async_proxy_fence();
    __syncwarp();
    if (lane_idx_ == 0) ptx::mbarrier_arrive(address(control_.q_full));
  }

  // Rows beyond the request are zeros.
  __device__ __forceinline__ void read_query(const MlaWorkItem& item, int row,
                                             QueryRow& values) const {
    constexpr int kColumnsCkv = Tile::kDimCkv / 8;
    const int num_rows = mla_rows_from(params_, item);
    const uint32_t packed = item.row_begin + row;
    const uint32_t token = params_.num_heads.divide(packed);
    const int64_t head = packed - token * params_.num_heads.divisor;
    const auto first = [&](const MlaRows& rows) {
      return static_cast<const Q*>(rows.data) +
             (item.qo_begin + int64_t{token}) * rows.stride_token + head * rows.stride_head;
    };
#pragma unroll
    for (int i = 0; i < kQueryPasses; ++i) {
      const int column = i * 32 + lane_idx_;
      values[i] = {};
      if (row < num_rows && column < kQueryColumns) {
        const Q* const source = column < kColumnsCkv
                                    ? first(params_.q_nope) + column * 8
                                    : first(params_.q_pe) + (column - kColumnsCkv) * 8;
        values[i] = *reinterpret_cast<const Eight*>(source);
      }
    }
  }

  __device__ __forceinline__ void store_query(int row, const QueryRow& loaded) const {
    float values[kQueryPasses][8];
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kQueryPasses; ++i) {
      to_floats(loaded[i], values[i]);
      if (i * 32 + lane_idx_ >= Tile::kDimCkv / 8) {
#pragma unroll
        for (int e = 0; e < 8; ++e) values[i][e] *= params_.rope_factor;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(values[i][e]));
    }
    largest = warp_reduce_max(largest);
    // The largest value gets the exponent 14, of float16's 15.
    const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 15u), 253u);
    const float factor = __uint_as_float((268 - exponent) << 23);
    if (lane_idx_ == 0) control_.row_scale[row] = __uint_as_float((exponent - 14) << 23);
#pragma unroll
    for (int i = 0; i < kQueryPasses; ++i) {
      const int column = i * 32 + lane_idx_;
      if (column >= kQueryColumns) break;
      ptx::store_shared_16(shared_ + Tile::kOffsetQ + swizzled_offset<64>(row, column),
                           pack_8(values[i], factor));
    }
  }

  // ---- Blocks ----

  // Where the row that the lane knows lies.
  using Places = typename CacheRows::Places;
  __device__ __forceinline__ static uint4 load(const void* base, int row_unit, int unit) {
    return ptx::load_global_16(static_cast<const uint4*>(base) +
                               (static_cast<int64_t>(row_unit) + unit));
  }

  // Asks for a row in L2, a block before its loads: a line of 128 bytes of it for each lane that
  // knows the row, then the others.
  __device__ __forceinline__ void prefetch(const Places& places) const {
    constexpr int kLines = Tile::kDimCkv / 128;
    const char* const row = static_cast<const char*>(params_.ckv.data) + int64_t{places.ckv} * 16;
#pragma unroll
    for (int i = 0; i < kLines; i += kSameRow) {
      const int line = i + lane_idx_ / kWarpRows;
      if (line < kLines) ptx::prefetch_l2(row + line * 128);
    }
  }

  // Load i of a half has 32 / kRowLanes rows.
  __device__ __forceinline__ void load_half(uint4 (&loaded)[kLoads], const Places& places,
                                            int half) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = i * (32 / kRowLanes) + lane_idx_ / kRowLanes;
      loaded[i] = load(params_.ckv.data, __shfl_sync(0xffffffffu, places.ckv, row),
                       half * kRowLanes + lane_idx_ % kRowLanes);
    }
  }
  __device__ __forceinline__ void load_rope(uint4 (&loaded)[kRopeLoads + 1],
                                            const Places& places) const {
    constexpr int kLanes = kRopeLanes == 0 ? 1 : kRopeLanes;
#pragma unroll
    for (int i = 0; i < kRopeLoads; ++i) {
      const int row = i * (32 / kLanes) + lane_idx_ / kLanes;
      loaded[i] =
          load(params_.kpe.data, __shfl_sync(0xffffffffu, places.kpe, row), lane_idx_ % kLanes);
    }
  }

  // ---- Stores ----
  //
  // A warp stores the rows of load `i` of its rows, `kLanes` lanes a row. Their places differ
  // from those of load 0 by constants, which the swizzle's exclusive-or keeps apart from the rest.

  template <int kLanes>
  __device__ __forceinline__ static uint32_t place(uint32_t of_load_0, int i) {
    constexpr int kRows = 32 / kLanes;
    return (of_load_0 ^ i * kRows % 8 * 16) + i * kRows * 128;
  }
  // Where the lane stores unit `unit` of 16 bytes of load 0, in a block at `block`.
  template <int kLanes>
  __device__ __forceinline__ uint32_t first_place(uint32_t block, int unit) const {
    return block + swizzled_offset<64>(CacheRows::first_row() + lane_idx_ / kLanes, unit);
  }

  // Lanes of odd groups of four store their second eight values first, so that eight lanes use all
  // banks.
  __device__ __forceinline__ bool swaps() const { return lane_idx_ / 4 % 2 != 0; }

  __device__ __forceinline__ void store_16(uint32_t target, const uint4& bytes) const {
    const uint2 first = swaps() ? uint2{bytes.z, bytes.w} : uint2{bytes.x, bytes.y};
    const uint2 second = swaps() ? uint2{bytes.x, bytes.y} : uint2{bytes.z, bytes.w};
    ptx::store_shared_16(target, widen(first));
    ptx::store_shared_16(target ^ 16, widen(second));
  }
  __device__ __forceinline__ static uint4 widen(const uint2& bytes) {
    uint32_t pairs[4];
    float8_to_half2<typename Tile::Ckv>(bytes.x, pairs[0], pairs[1]);
    float8_to_half2<typename Tile::Ckv>(bytes.y, pairs[2], pairs[3]);
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }

  __device__ __forceinline__ uint32_t block_address(int block) const {
    return shared_ + Tile::kOffsetK + block * Tile::kBlockBytes;
  }

  __device__ __forceinline__ uint32_t full_barrier(int block, int chunk) const {
    return address(control_.kv_full[block][chunk]);
  }

  // Stores a half of a block as soon as its place is free.
  __device__ __forceinline__ void store_half(const uint4 (&loaded)[kLoads], int block, int half,
                                             uint32_t parity) const {
    const int unit = half * kRowLanes + lane_idx_ % kRowLanes;
    const uint32_t target =
        first_place<kRowLanes>(block_address(block), 2 * unit + (swaps() ? 1 : 0));
    ptx::mbarrier_wait_soon(address(control_.kv_empty[block][half]), parity);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) store_16(place<kRowLanes>(target, i), loaded[i]);
    announce(block, half * Tile::kChunksHalf, Tile::kChunksHalf);
  }
  __device__ __forceinline__ void store_rope(const uint4 (&loaded)[kRopeLoads + 1],
                                             int block) const {
    constexpr int kLanes = kRopeLanes == 0 ? 1 : kRopeLanes;
    const int unit = lane_idx_ % kLanes;
    const uint32_t first =
        first_place<kLanes>(block_address(block) + Tile::kChunksCkv * Tile::kChunkBytes,
                            sizeof(Kpe) == 1 ? 2 * unit + (swaps() ? 1 : 0) : unit);
#pragma unroll
    for (int i = 0; i < kRopeLoads; ++i) {
      const uint32_t target = place<kLanes>(first, i);
      if constexpr (std::is_same_v<Kpe, T>) {
        ptx::store_shared_16(target, loaded[i]);
      } else if constexpr (sizeof(Kpe) == 1) {
        store_16(target, loaded[i]);
      } else {
        float values[8];
        const uint32_t pairs[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
        unpack<Kpe>(pairs, values);
        ptx::store_shared_16(target, pack_8(values, 1.f));
      }
    }
    if (kRopeLoads != 0) announce(block, Tile::kChunksCkv, 1);
  }

  __device__ __forceinline__ void widen_blocks(const MlaWorkItem item) {
    if (item.kv_begin >= item.kv_end || params_.num_pages == 0) return;
    const CacheRows cache_rows(params_);
    // `loaded` and `rope` are stored next. Places of blocks are found a block before their loads,
    // pages two.
    uint4 loaded[kLoads], rope[kRopeLoads + 1];
    const auto find = [&](int token) {
      return cache_rows.find(item, cache_rows.find_page(item, token), token);
    };
    const Places places = find(item.kv_begin);
    Places next = find(item.kv_begin + Tile::kBlock);
    int page = cache_rows.find_page(item, item.kv_begin + 2 * Tile::kBlock);
    load_half(loaded, places, kLeft);
    load_rope(rope, places);
    Places own = places;  // of the block at hand
#pragma unroll 1
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      const int block = (token - item.kv_begin) / Tile::kBlock % 2;
      const uint32_t parity = phases_ >> block & 1;
      phases_ ^= 1u << block;
      // The second block's halves are multiplied the other way round, so that this block's second
      // half is followed by the next block's.
      const int first = block == 0 ? kLeft : kRight, second = 1 - first;
      store_half(loaded, block, first, parity);
      const Places later = cache_rows.find(item, page, token + 2 * Tile::kBlock);
      load_half(loaded, own, second);
      store_half(loaded, block, second, parity);
      store_rope(rope, block);
      __syncwarp();  // no load goes before the stores
      load_half(loaded, next, second);
      load_rope(rope, next);
      own = next;
      next = later;
      prefetch(next);
      page = cache_rows.find_page(item, token + 3 * Tile::kBlock);
    }
  }

  // The warp's rows are there.
  __device__ __forceinline__ void announce(int block, int first_chunk, int num_chunks) const {
    ptx::async_proxy_fence();
    __syncwarp();
    if (lane_idx_ < num_chunks) ptx::mbarrier_arrive(full_barrier(block, first_chunk + lane_idx_));
  }

  const MlaParams& params_;
  MlaControl& control_;
  MlaProfile<Tile::kProfiled> profile_;
  const uint32_t shared_;
  int warp_idx_, lane_idx_;
  uint32_t phases_ = 3;  // bit b: the parity that says that block b is empty
};

}  // namespace flashinfer
