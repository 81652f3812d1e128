// The two warpgroups that feed those who multiply from tokens with scales: eight warps load KV,
// make bfloat16 of it, and store it where products read it.
//
// A warp has eight rows at a time, and of either half of their latent columns the chunks of one
// scale, two: four lanes have a row, 16 columns a load. So each lane knows its row's place and
// scales, and what a warp stores of a half is a stretch of 2 KiB. Nothing stands between the loads
// of a block: after a shuffle among them the compiler would copy registers, and so wait for each.
//
// The two CTAs of a cluster have the same KV rows. Each widens half of them, whose stretches the
// copy engine brings to the other CTA.
#pragma once

#include <flashinfer/common/float8.cuh>
#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/sm90/cache_rows.cuh>
#include <flashinfer/mla/sm90/producer.cuh>
#include <flashinfer/mla/sm90/share.cuh>
#include <flashinfer/ptx/cluster.cuh>
#include <flashinfer/ptx/global.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/mbarrier_cluster.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/prefetch.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

template <typename Tile, int kSharers>
class MlaScaledWidener {
  using T = typename Tile::T;
  static constexpr int kWarps = Tile::kLoadWarps, kGroupWarps = kWarps / 2;
  static constexpr int kGroups = 8 / kGroupWarps / kSharers;  // of eight rows, that a warp has
  static constexpr int kHalves = kSharers;                    // that are loaded at a time
  static constexpr int kLoads = kGroups * 2;                  // of a half
  static constexpr int kStretch = 2 * 1024;
  static_assert(kWarps == 8 && Tile::kDimCkv == 512 && Tile::kDimKpe == 64);
  using CacheRows = MlaCacheRows<typename Tile::Kpe>;
  // Of the lane's rows of a block: where they lie, and what either half is multiplied with.
  using Places = typename CacheRows::Places[kGroups];
  using Scales = float[kGroups][2];

 public:
  __device__ __forceinline__ MlaScaledWidener(const MlaParams& params, char* shared,
                                              MlaControl& control)
      : params_(params),
        control_(control),
        profile_(params, 2, kMlaProfileGroups, threadIdx.x % 256 == 0),
        shared_(ptx::shared_address(shared)) {
    const int warp = threadIdx.x / 32 % kWarps;
    lane_idx_ = threadIdx.x % 32;
    side_ = warp / kGroupWarps;
    group_ = warp % kGroupWarps;
    if (kSharers == 2) {
      group_ += ptx::cluster_rank() * kGroupWarps;
      to_other_ = ptx::remote_address(shared_, ptx::cluster_rank() ^ 1) - shared_;
    }
    const int row = lane_idx_ / 4, unit = lane_idx_ % 4 * 2;
    lane_offset_ = group_ * Tile::kGroupBytes + side_ * kStretch + row * 128 + (unit ^ row) * 16;
  }

  __device__ __forceinline__ void run() {
    const MlaShare share(params_);
    MlaWorkItem item = share.first;
    ptx::grid_dependency_wait();
    ptx::cluster_wait();
    for (int i = share.begin; i < share.end; ++i) {
      if (i != share.begin) item = params_.items[i];
      profile_.begin(MlaEvent::kLoad);
      widen_blocks(item, (i - share.begin) % 2);
      profile_.end(MlaEvent::kLoad);
    }
  }

 private:
  template <typename U>
  __device__ __forceinline__ static uint32_t address(U& in_shared) {
    return ptx::shared_address(&in_shared);
  }

  // ---- Queries ----

  // Rows beyond the request are zeros.
  __device__ __forceinline__ void copy_query(const MlaWorkItem& item, uint32_t parity) const {
    constexpr int kColumnsCkv = Tile::kDimCkv / 8, kColumns = kColumnsCkv + Tile::kDimKpe / 8;
    const int num_rows = mla_rows_from(params_, item);
    ptx::mbarrier_wait(address(control_.q_empty), parity ^ 1);
#pragma unroll 1
    for (int row = threadIdx.x / 32 % kWarps; row < Tile::kRows; row += kWarps) {
      const bool exists = row < num_rows;
      const uint32_t packed = exists ? item.row_begin + row : 0;
      const uint32_t token = params_.num_heads.divide(packed);
      const int64_t head = packed - token * params_.num_heads.divisor;
      const auto first = [&](const MlaRows& rows) {
        return static_cast<const T*>(rows.data) +
               (item.qo_begin + int64_t{token}) * rows.stride_token + head * rows.stride_head;
      };
      const T *const nope = first(params_.q_nope), *const pe = first(params_.q_pe);
#pragma unroll
      for (int i = 0; i < ceil_div(kColumns, 32); ++i) {
        const int column = i * 32 + lane_idx_;
        if (column >= kColumns) break;
        const T* const source =
            column < kColumnsCkv ? nope + column * 8 : pe + (column - kColumnsCkv) * 8;
        ptx::cp_async_16(shared_ + Tile::kOffsetQ + swizzled_offset<64>(row, column), source,
                         exists);
      }
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void announce_query() const {
    ptx::cp_async_wait<0>();
    ptx::async_proxy_fence();
    __syncwarp();
    if (lane_idx_ == 0) ptx::mbarrier_arrive(address(control_.q_full));
  }

  // ---- Blocks ----

  // Rows beyond the item repeat its last one (cache_rows.cuh says why).
  __device__ __forceinline__ int token_of(const MlaWorkItem& item, int block_token,
                                          int group) const {
    const int row = (group_ + group * kGroupWarps) * 8 + lane_idx_ / 4;
    return min(block_token + row, item.kv_end - 1);
  }

  using Pages = int[kGroups];
  __device__ __forceinline__ void find_pages(Pages& pages, const MlaWorkItem& item,
                                             int block_token) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t number = params_.page_size.divide(token_of(item, block_token, g));
      pages[g] = params_.kv_indices[item.kv_base + static_cast<int>(number)];
    }
  }

  __device__ __forceinline__ void find(Places& places, const Pages& pages, const MlaWorkItem& item,
                                       int block_token) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      places[g] = CacheRows::place_of(params_, pages[g], token_of(item, block_token, g));
    }
  }

  __device__ __forceinline__ const char* row_of(const Places& places, int group) const {
    return static_cast<const char*>(params_.ckv.data) + int64_t{places[group].ckv} * 16;
  }

  __device__ __forceinline__ void load_scales(Scales& scales, const Places& places) const {
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const float* const of_row =
          reinterpret_cast<const float*>(row_of(places, i / 2) + Tile::kDimCkv);
      scales[i / 2][i % 2] = of_row[i % 2 * 2 + side_];
    }
  }

  // Asks for rows in L2, a block before their loads: a line of 128 bytes for each lane, of both
  // warps that have the row.
  __device__ __forceinline__ void prefetch(const Places& places) const {
    constexpr int kLines = Tile::kDimCkv / 128 + 2;
    const int line = side_ * 4 + lane_idx_ % 4;
    if (line >= kLines) return;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) ptx::prefetch_l2(row_of(places, g) + line * 128);
  }

  __device__ __forceinline__ void load_half(uint4 (&loaded)[kLoads], const Places& places,
                                            int half) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int unit = half * 16 + side_ * 8 + i % 2 * 4 + lane_idx_ % 4;
      loaded[i] = ptx::load_global_16(row_of(places, i / 2) + unit * 16);
    }
  }

  // Half of the warp's rows, eight lanes a row; the other half is that of the warp that has the
  // same rows.
  __device__ __forceinline__ int rope_row() const { return side_ * 4 + lane_idx_ / 8; }
  __device__ __forceinline__ void find_rope(int (&rope)[kGroups], const Places& places) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      rope[g] = __shfl_sync(0xffffffffu, places[g].kpe, rope_row() * 4);
    }
  }
  __device__ __forceinline__ void load_rope(uint4 (&loaded)[kGroups],
                                            const int (&places)[kGroups]) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      loaded[g] = ptx::load_global_16(static_cast<const uint4*>(params_.kpe.data) +
                                      (int64_t{places[g]} + lane_idx_ % 8));
    }
  }

  // ---- Stores ----

  __device__ __forceinline__ uint32_t block_address(int block) const {
    return shared_ + Tile::kOffsetK + block * Tile::kBlockBytes;
  }

  __device__ __forceinline__ static uint4 widen(uint32_t first, uint32_t second, float scale) {
    uint32_t halves[4];
    float8_to_half2<typename Tile::Ckv>(first, halves[0], halves[1]);
    float8_to_half2<typename Tile::Ckv>(second, halves[2], halves[3]);
#pragma unroll
    for (uint32_t& pair : halves) {
      const auto value = [&](int i) {
        return to_float(dtype::float16{static_cast<uint16_t>(pair >> i * 16)}) * scale;
      };
      pair = PackedPair<T>::pack(value(0), value(1));
    }
    return {halves[0], halves[1], halves[2], halves[3]};
  }

  // Stores a half of a block as soon as its place is free. Eight lanes use all banks: two rows.
  __device__ __forceinline__ void store_half(const uint4 (&loaded)[kLoads], const Scales& scales,
                                             int block, int half, uint32_t parity) const {
    const uint32_t first = block_address(block) + Tile::chunk_offset(half * Tile::kChunksHalf);
    ptx::mbarrier_wait_soon(address(control_.kv_empty[block][half]), parity);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint32_t target = first + lane_offset_ + i / 2 * kGroupWarps * Tile::kGroupBytes +
                              i % 2 * Tile::kColumnBytes;
      const float scale = half == 0 ? scales[i / 2][0] : scales[i / 2][1];
      ptx::store_shared_16(target, widen(loaded[i].x, loaded[i].y, scale));
      ptx::store_shared_16(target ^ 16, widen(loaded[i].z, loaded[i].w, scale));
    }
    announce(first + group_ * Tile::kGroupBytes + side_ * kStretch, kStretch,
             address(control_.kv_full[block][half * Tile::kChunksHalf + 2 * side_]));
  }

  __device__ __forceinline__ void store_rope(const uint4 (&loaded)[kGroups], int block) const {
    const uint32_t first = block_address(block) + Tile::chunk_offset(Tile::kChunksCkv);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int row = (group_ + g * kGroupWarps) * 8 + rope_row();
      ptx::store_shared_16(first + swizzled_offset<64>(row, lane_idx_ % 8), loaded[g]);
    }
    announce(first + (group_ * 8 + side_ * 4) * 128, 4 * 128,
             address(control_.kv_full[block][Tile::kChunksCkv]));
  }

  // What the warp has stored is there. The other CTA gets it, too, and brings as much.
  __device__ __forceinline__ void announce(uint32_t stretch, int bytes, uint32_t full) const {
    ptx::async_proxy_fence();
    __syncwarp();
    if (lane_idx_ != 0) return;
    if constexpr (kSharers == 1) {
      ptx::mbarrier_arrive(full);
    } else {
      ptx::bulk_copy_remote(stretch + to_other_, stretch, bytes, full + to_other_);
      ptx::mbarrier_arrive_expect(full, bytes);
    }
  }

  __device__ __forceinline__ void widen_blocks(const MlaWorkItem& item, uint32_t query_parity) {
    const bool has_blocks = item.kv_begin < item.kv_end && params_.num_pages != 0;
    if (!has_blocks) {
      copy_query(item, query_parity);
      announce_query();
      return;
    }
    // What is loaded is stored next. Where a block lies is found a block before, pages two: no
    // iteration waits for what it asks for itself.
    uint4 loaded[kHalves][kLoads], rope[kGroups];
    Scales scales;
    Pages pages, next_pages;
    Places own, next;
    int rope_places[kGroups];
    const auto load = [&](const Places& places, int first) {
#pragma unroll
      for (int i = 0; i < kHalves; ++i) load_half(loaded[i], places, i == 0 ? first : 1 - first);
      load_rope(rope, rope_places);
      load_scales(scales, places);
    };
    find_pages(pages, item, item.kv_begin);
    find_pages(next_pages, item, item.kv_begin + Tile::kBlock);
    find(own, pages, item, item.kv_begin);
    find_rope(rope_places, own);
    load(own, kLeft);
    find(next, next_pages, item, item.kv_begin + Tile::kBlock);
    find_pages(pages, item, item.kv_begin + 2 * Tile::kBlock);
    prefetch(next);
    copy_query(item, query_parity);
#pragma unroll 1
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      const int block = (token - item.kv_begin) / Tile::kBlock % 2;
      const uint32_t parity = phases_ >> block & 1;
      phases_ ^= 1u << block;
      // The second block's halves are multiplied the other way round, so that this block's second
      // half is followed by the next block's.
      const int first = block == 0 ? kLeft : kRight, second = 1 - first;
      find_rope(rope_places, next);
      store_half(loaded[0], scales, block, first, parity);
      if constexpr (kHalves == 1) load_half(loaded[0], own, second);
      if (token == item.kv_begin) announce_query();
      store_half(loaded[kHalves - 1], scales, block, second, parity);
      store_rope(rope, block);
      __syncwarp();  // no load goes before the stores
      load(next, second);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) own[g] = next[g];
      find(next, pages, item, token + 2 * Tile::kBlock);
      find_pages(pages, item, token + 3 * Tile::kBlock);
      prefetch(next);
    }
  }

  const MlaParams& params_;
  MlaControl& control_;
  MlaProfile<Tile::kProfiled> profile_;
  const uint32_t shared_;
  int lane_idx_;
  int side_, group_;       // which of either half's scales the warp has, and its first eight rows
  uint32_t lane_offset_;   // of what the lane stores first, in a half
  uint32_t to_other_ = 0;  // from an address in shared memory to the same one in the other CTA
  uint32_t phases_ = 3;    // bit b: the parity that says that block b is empty
};

}  // namespace flashinfer
