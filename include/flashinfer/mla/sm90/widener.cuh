// The warpgroup that feeds the others from caches of 8 bits: its four warps load KV, make float16
// of it, which represents every e4m3 value, and store it where the copy engine would.
//
// Each warp has 16 rows of a block. Its loads of 16 bytes are under way over the borders of parts
// and blocks: a half of a block comes in two batches, kpe in a third, and registers that have been
// stored are loaded anew, a batch at a time. A batch and not a register, because a thread waits for
// loads by few counters: a load that is waited for would wait for younger ones.
//
// Queries become T, too: with a power of two per row, so that none is too large or too small
// for it. Logits are multiplied by its inverse.
#pragma once

#include <flashinfer/common/float8.cuh>
#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/mla/sm90/cache_rows.cuh>
#include <flashinfer/mla/sm90/producer.cuh>
#include <flashinfer/ptx/global.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

template <typename Tile>
class MlaWidener {
  using T = typename Tile::T;
  using Q = typename Tile::Q;
  using Kpe = typename Tile::Kpe;
  static constexpr int kHalfColumns = Tile::kDimCkv / 2;
  static constexpr int kRowLanes = kHalfColumns / 16;  // that load a half of a row
  static constexpr int kLoads = 16 * kRowLanes / 32;   // of a half of the 16 rows
  static constexpr int kBatch = kLoads / 2;
  // Lanes that load a row of kpe, and loads.
  static constexpr int kRopeLanes = Tile::kDimKpe * static_cast<int>(sizeof(Kpe)) / 16;
  static constexpr int kRopeLoads = kRopeLanes / 2;

 public:
  __device__ __forceinline__ MlaWidener(const MlaParams& params, char* shared, MlaControl& control)
      : params_(params),
        control_(control),
        profile_(params, 2, kMlaProfileGroups, threadIdx.x % 128 == 0),
        shared_(ptx::shared_address(shared)) {
    warp_idx_ = threadIdx.x / 32 % 4;
    lane_idx_ = threadIdx.x % 32;
  }

  __device__ __forceinline__ void run() {
    ptx::grid_dependency_wait();
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

  // Eight values as floats.
  template <typename U>
  __device__ __forceinline__ static void load_8(const U* source, float (&values)[8]) {
    if constexpr (sizeof(U) == 1) {
      const uint2 bytes = *reinterpret_cast<const uint2*>(source);
      uint32_t pairs[4];
      float8_to_half2<U>(bytes.x, pairs[0], pairs[1]);
      float8_to_half2<U>(bytes.y, pairs[2], pairs[3]);
      unpack<dtype::float16>(pairs, values);
    } else {
      const uint4 bits = *reinterpret_cast<const uint4*>(source);
      const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
      unpack<U>(pairs, values);
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

  // A warp has a row at a time; rows beyond the request become zeros.
  __device__ __forceinline__ void load_query(const MlaWorkItem item, uint32_t parity) {
    constexpr int kColumnsCkv = Tile::kDimCkv / 8, kColumns = kColumnsCkv + Tile::kDimKpe / 8;
    constexpr int kPasses = ceil_div(kColumns, 32);
    const int num_rows = item.qo_len * static_cast<int>(params_.num_heads.divisor) - item.row_begin;
    ptx::mbarrier_wait(address(control_.q_empty), parity ^ 1);
#pragma unroll 1
    for (int row = warp_idx_; row < Tile::kRows; row += 4) {
      const uint32_t packed = item.row_begin + row;
      const uint32_t token = params_.num_heads.divide(packed);
      const int64_t head = packed - token * params_.num_heads.divisor;
      const auto first = [&](const MlaRows& rows) {
        return static_cast<const Q*>(rows.data) +
               (item.qo_begin + int64_t{token}) * rows.stride_token + head * rows.stride_head;
      };
      float values[kPasses][8] = {};
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int column = i * 32 + lane_idx_;
        if (row < num_rows && column < kColumns) {
          const bool is_ckv = column < kColumnsCkv;
          load_8(is_ckv ? first(params_.q_nope) + column * 8
                        : first(params_.q_pe) + (column - kColumnsCkv) * 8,
                 values[i]);
          if (!is_ckv) {
#pragma unroll
            for (int e = 0; e < 8; ++e) values[i][e] *= params_.rope_factor;
          }
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(values[i][e]));
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
      }
      // The largest value gets the exponent 14, of float16's 15.
      const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 15u), 253u);
      const float factor = __uint_as_float((268 - exponent) << 23);
      if (lane_idx_ == 0) control_.row_scale[row] = __uint_as_float((exponent - 14) << 23);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int column = i * 32 + lane_idx_;
        if (column >= kColumns) break;
        ptx::store_shared_16(shared_ + Tile::kOffsetQ + swizzled_offset<64>(row, column),
                             pack_8(values[i], factor));
      }
    }
    ptx::async_proxy_fence();
    __syncwarp();
    if (lane_idx_ == 0) ptx::mbarrier_arrive(address(control_.q_full));
  }

  // ---- Blocks ----

  // Where lane i's row lies. Lanes i and i + 16 share a row; `scales` are those of groups i / 16
  // and i / 16 + 2.
  struct Rows : MlaCacheRows<Kpe>::Places {
    float scales[Tile::kScaled ? 2 : 1];
  };

  __device__ __forceinline__ int find_page(const MlaWorkItem& item, int block_token) const {
    return MlaCacheRows<Kpe>(params_).find_page(item, block_token);
  }

  __device__ __forceinline__ Rows find_rows(const MlaWorkItem& item, int found_page,
                                            int block_token) const {
    Rows rows = {MlaCacheRows<Kpe>(params_).find(item, found_page, block_token), {}};
    if constexpr (Tile::kScaled) {
      const auto* row = static_cast<const uint4*>(params_.ckv.data) + int64_t{rows.ckv};
      const float* scales = reinterpret_cast<const float*>(row + Tile::kDimCkv / 16);
      rows.scales[0] = scales[lane_idx_ / 16];
      rows.scales[1] = scales[lane_idx_ / 16 + 2];
    }
    return rows;
  }

  __device__ __forceinline__ static uint4 load(const void* base, int row_unit, int unit) {
    return ptx::load_global_16(static_cast<const uint4*>(base) +
                               (static_cast<int64_t>(row_unit) + unit));
  }

  // Load `i` of a half: 32 / kRowLanes rows.
  __device__ __forceinline__ uint4 load_half(const Rows& rows, int half, int i) const {
    const int row = i * (32 / kRowLanes) + lane_idx_ / kRowLanes;
    return load(params_.ckv.data, __shfl_sync(0xffffffffu, rows.ckv, row),
                half * kRowLanes + lane_idx_ % kRowLanes);
  }
  __device__ __forceinline__ uint4 load_rope(const Rows& rows, int i) const {
    if constexpr (kRopeLanes == 0) return {0, 0, 0, 0};
    constexpr int kLanes = kRopeLanes == 0 ? 1 : kRopeLanes;
    const int row = i * (32 / kLanes) + lane_idx_ / kLanes;
    return load(params_.kpe.data, __shfl_sync(0xffffffffu, rows.kpe, row), lane_idx_ % kLanes);
  }

  // ---- Stores ----
  //
  // A warp stores the rows of load `i` of its 16 rows, `kLanes` lanes a row. Their places differ
  // from those of load 0 by constants, which the swizzle's exclusive-or keeps apart from the rest.

  template <int kLanes>
  __device__ __forceinline__ static uint32_t place(uint32_t of_load_0, int i) {
    constexpr int kRows = 32 / kLanes;
    return (of_load_0 ^ i * kRows % 8 * 16) + i * kRows * 128;
  }
  // Where the lane stores unit `unit` of 16 bytes of load 0, in a block at `block`.
  template <int kLanes>
  __device__ __forceinline__ uint32_t first_place(uint32_t block, int unit) const {
    return block + swizzled_offset<64>(warp_idx_ * 16 + lane_idx_ / kLanes, unit);
  }

  // Lanes of odd groups of four store their second eight values first, so that eight lanes use all
  // banks.
  __device__ __forceinline__ bool swaps() const { return lane_idx_ / 4 % 2 != 0; }

  __device__ __forceinline__ void store_16(uint32_t target, const uint4& bytes, float scale) const {
    const uint2 first = swaps() ? uint2{bytes.z, bytes.w} : uint2{bytes.x, bytes.y};
    const uint2 second = swaps() ? uint2{bytes.x, bytes.y} : uint2{bytes.z, bytes.w};
    ptx::store_shared_16(target, widen(first, scale));
    ptx::store_shared_16(target ^ 16, widen(second, scale));
  }
  __device__ __forceinline__ static uint4 widen(const uint2& bytes, float scale) {
    uint32_t pairs[4];
    float8_to_half2<typename Tile::Ckv>(bytes.x, pairs[0], pairs[1]);
    float8_to_half2<typename Tile::Ckv>(bytes.y, pairs[2], pairs[3]);
    if constexpr (!Tile::kScaled) return {pairs[0], pairs[1], pairs[2], pairs[3]};
    float values[8];
    unpack<dtype::float16>(pairs, values);
    return pack_8(values, scale);
  }

  __device__ __forceinline__ uint32_t block_address(int block) const {
    return shared_ + Tile::kOffsetK + block * Tile::kBlockBytes;
  }

  // `target`: of load 0.
  __device__ __forceinline__ void store_half(const uint4& loaded, const Rows& rows, int half, int i,
                                             uint32_t target) const {
    float scale = 1.f;
    if constexpr (Tile::kScaled) {
      const int row = i * (32 / kRowLanes) + lane_idx_ / kRowLanes;
      const float of_half = half == kLeft ? rows.scales[0] : rows.scales[1];
      scale = __shfl_sync(0xffffffffu, of_half, row + lane_idx_ / 8 % 2 * 16);
    }
    store_16(place<kRowLanes>(target, i), loaded, scale);
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
        store_16(target, loaded[i], 1.f);
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
    // `loaded` and `rope` are stored next. Places of blocks are found a block before their loads,
    // pages two.
    uint4 loaded[2][kBatch], rope[kRopeLoads + 1];
    const auto find = [&](int token) { return find_rows(item, find_page(item, token), token); };
    Rows rows = find(item.kv_begin), next = find(item.kv_begin + Tile::kBlock);
    int page = find_page(item, item.kv_begin + 2 * Tile::kBlock);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loaded[i / kBatch][i % kBatch] = load_half(rows, kLeft, i);
#pragma unroll
    for (int i = 0; i < kRopeLoads; ++i) rope[i] = load_rope(rows, i);
#pragma unroll 1
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      const int block = (token - item.kv_begin) / Tile::kBlock % 2;
      const uint32_t parity = phases_ >> block & 1;
      phases_ ^= 1u << block;
      // The second block's halves are multiplied the other way round, so that this block's second
      // half is followed by the next block's.
      const int first = block == 0 ? kLeft : kRight, second = 1 - first;
      move_half(loaded, rows, block, first, parity, rows);
      move_half(loaded, rows, block, second, parity, next);
      store_rope(rope, block);
#pragma unroll
      for (int i = 0; i < kRopeLoads; ++i) rope[i] = load_rope(next, i);
      rows = next;
      next = find_rows(item, page, token + 2 * Tile::kBlock);
      page = find_page(item, token + 3 * Tile::kBlock);
    }
  }

  // Stores what is loaded as a half of a block, and loads the second half of rows `following`.
  __device__ __forceinline__ void move_half(uint4 (&loaded)[2][kBatch], const Rows& rows, int block,
                                            int half, uint32_t parity, const Rows& following) {
    const int second = block == 0 ? kRight : kLeft;
    const uint32_t target = first_place<kRowLanes>(
        block_address(block), 2 * (half * kRowLanes + lane_idx_ % kRowLanes) + (swaps() ? 1 : 0));
    ptx::mbarrier_wait(address(control_.kv_empty[block][half]), parity);
#pragma unroll
    for (int batch = 0; batch < 2; ++batch) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        store_half(loaded[batch][i], rows, half, batch * kBatch + i, target);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        loaded[batch][i] = load_half(following, second, batch * kBatch + i);
      }
      __syncwarp();  // mixed with the other batch, these would need more registers
    }
    announce(block, half * Tile::kChunksHalf, Tile::kChunksHalf);
  }

  __device__ __forceinline__ void announce(int block, int first_chunk, int num_chunks) const {
    ptx::async_proxy_fence();
    __syncwarp();
    if (lane_idx_ < num_chunks) {
      ptx::mbarrier_arrive(address(control_.kv_full[block][first_chunk + lane_idx_]));
    }
  }

  const MlaParams& params_;
  MlaControl& control_;
  MlaProfile<Tile::kProfiled> profile_;
  const uint32_t shared_;
  int warp_idx_, lane_idx_;
  uint32_t phases_ = 3;  // bit b: the parity that says that block b is empty
};

}  // namespace flashinfer
