// The warpgroup that feeds the others. One warp makes the copy engine load KV, and three copy
// queries. If pages are no multiples of 16 tokens, all four copy KV, 16 bytes per thread at a time.
#pragma once

#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/mla/events.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/mla_params.h>
#include <flashinfer/mla/sm90/boxes.cuh>
#include <flashinfer/mla/sm90/share.cuh>
#include <flashinfer/mla/sm90/tile.cuh>
#include <flashinfer/ptx/cluster.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/tma.cuh>
#include <flashinfer/ptx/tma_multicast.cuh>

namespace flashinfer {

// `kSharers`: CTAs of the cluster, which have the same KV rows.
template <typename Tile, int kSharers>
class MlaProducer {
  static constexpr bool kQueriesAreBoxes = Tile::template kQueriesAreBoxes<kSharers>;

 public:
  __device__ __forceinline__ MlaProducer(const MlaSm90Params& params, char* shared,
                                         MlaControl& control)
      : params_(params.mla),
        maps_(params),
        control_(control),
        profile_(params.mla, 2, kMlaProfileGroups, threadIdx.x % 128 == 0),
        shared_(ptx::shared_address(shared)) {
    box_shift_ = __popc(params.box_rows - 1);
    warp_idx_ = threadIdx.x / 32 % 4;
    lane_idx_ = threadIdx.x % 32;
  }

  __device__ __forceinline__ void run() {
    const MlaShare share = MlaShare::guess(params_);
    const int begin = share.begin, end = share.end;
    MlaWorkItem item = share.first;
    ptx::grid_dependency_wait();
    if (maps_.box_rows == 0) {
      ptx::cluster_wait();
      for (int i = begin; i < end; ++i) {
        if (i != begin) item = params_.items[i];
        load_query<4>(item, warp_idx_, (i - begin) % 2);
        copy_blocks(item);
      }
    } else if (warp_idx_ == 0) {
      MlaBoxPages pages = MlaBoxPages::find(maps_, item, lane_idx_);
      ptx::cluster_wait();
      for (int i = begin; i < end; ++i) {
        if (i != begin) {
          item = params_.items[i];
          pages = MlaBoxPages::find(maps_, item, lane_idx_);
        }
        if constexpr (kQueriesAreBoxes) load_query_boxes(item);
        load_boxes(item, pages.of(params_));
      }
    } else {
      ptx::cluster_wait();
      for (int i = begin; !kQueriesAreBoxes && i < end; ++i) {
        if (i != begin) item = params_.items[i];
        load_query<3>(item, warp_idx_ - 1, (i - begin) % 2);
      }
    }
  }

 private:
  template <typename T>
  __device__ __forceinline__ static uint32_t address(T& in_shared) {
    return ptx::shared_address(&in_shared);
  }

  __device__ __forceinline__ uint32_t block_address(int block) const {
    return shared_ + Tile::kOffsetK + block * Tile::kBlockBytes;
  }

  __device__ __forceinline__ uint32_t next_parity(int block) {
    const uint32_t parity = phases_ >> block & 1;
    phases_ ^= 1u << block;
    return parity;
  }

  // Copies rows warp, warp + kWarps, ...; rows beyond the request become zeros.
  template <int kWarps>
  __device__ __forceinline__ void load_query(const MlaWorkItem& item, int warp, uint32_t parity) {
    constexpr int kColumnsCkv = Tile::kDimCkv / 8, kColumns = kColumnsCkv + Tile::kDimKpe / 8;
    const uint32_t target = shared_ + Tile::kOffsetQ;
    const int num_rows = mla_rows_from(params_, item);
    ptx::mbarrier_wait(address(control_.q_empty), parity ^ 1);
#pragma unroll 1
    for (int row = warp; row < Tile::kRows; row += kWarps) {
      const uint32_t packed = item.row_begin + row;
      const uint32_t token = params_.num_heads.divide(packed);
      const int64_t head = packed - token * params_.num_heads.divisor;
      const bool exists = row < num_rows;
      const int64_t first = item.qo_begin + int64_t{token};
      const char* nope = static_cast<const char*>(params_.q_nope.data);
      const char* pe = static_cast<const char*>(params_.q_pe.data);
      if (exists) {
        nope += (first * params_.q_nope.stride_token + head * params_.q_nope.stride_head) * 2;
        pe += (first * params_.q_pe.stride_token + head * params_.q_pe.stride_head) * 2;
      }
#pragma unroll
      for (int column = lane_idx_; column < kColumns; column += 32) {
        const bool is_ckv = column < kColumnsCkv;
        const char* source = is_ckv ? nope + (exists ? column * 16 : 0)
                                    : pe + (exists ? (column - kColumnsCkv) * 16 : 0);
        ptx::cp_async_16(target + swizzled_offset<64>(row, column), source, exists);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::async_proxy_fence();
    __syncwarp();
    if (lane_idx_ == 0) ptx::mbarrier_arrive(address(control_.q_full));
  }

  // ---- Boxes of the copy engine, by one warp ----

  // One lane per chunk, in the order of products. A chunk's bytes count towards the barrier of the
  // same chunk of the item's first block, so that logits begin when the first chunks of both are
  // there. Queries need no page numbers, which may still be on their way.
  __device__ __forceinline__ void load_query_boxes(const MlaWorkItem& item) {
    if (item.kv_begin >= item.kv_end) return;
    ptx::mbarrier_wait(address(control_.q_empty), query_parity_);
    query_parity_ ^= 1;
    if (lane_idx_ < Tile::kChunks) {
      const bool is_rope = Tile::kDimKpe != 0 && lane_idx_ == 0;
      const int chunk = is_rope ? Tile::kChunksCkv : lane_idx_ - (Tile::kDimKpe != 0 ? 1 : 0);
      const uint32_t token = params_.num_heads.divide(item.row_begin);
      const int head = item.row_begin - token * params_.num_heads.divisor;
      const uint32_t full = address(control_.kv_full[0][chunk]);
      ptx::mbarrier_expect(full, Tile::kChunkBytes);
      ptx::tma_load(shared_ + Tile::kOffsetQ + chunk * Tile::kChunkBytes,
                    is_rope ? &maps_.q_pe : &maps_.q_nope, full, is_rope ? 0 : chunk * 64, head,
                    item.qo_begin + static_cast<int>(token));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_boxes(const MlaWorkItem& item, const MlaBoxPages& found) {
    const int box_rows = maps_.box_rows, boxes = Tile::kBlock >> box_shift_;  // of a block
    int pages = found.first, next_pages = found.next, box = 0;
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      const int block = (token - item.kv_begin) / Tile::kBlock % 2;
      profile_.begin(MlaEvent::kLoad);
      load_block(item, block, token, pages, box);
      profile_.end(MlaEvent::kLoad);
      box += boxes;
      if (box == 32) {
        box = 0;
        pages = next_pages;
        next_pages =
            MlaBoxPages::page_of(params_, item, token + Tile::kBlock + (32 + lane_idx_) * box_rows);
      }
    }
  }

  // In the order of products.
  __device__ __forceinline__ void load_block(const MlaWorkItem& item, int block, int first_token,
                                             int pages, int first_box) {
    constexpr int kChunksHalf = Tile::kChunksHalf;
    const int box_rows = static_cast<int>(maps_.box_rows);
    const int num_boxes = min(Tile::kBlock, item.kv_end - first_token + box_rows - 1) >> box_shift_;
    const uint32_t parity = next_parity(block);
    const int first = block == 0 ? kLeft : kRight;
    if (Tile::kRopeFirst) {
      load_part<1>(kRope, block, parity, first_token, num_boxes, pages, first_box);
    }
    load_part<kChunksHalf>(first, block, parity, first_token, num_boxes, pages, first_box);
    load_part<kChunksHalf>(1 - first, block, parity, first_token, num_boxes, pages, first_box);
  }

  // One lane per box of 64 columns. All about it is known before the lane waits for its place: what
  // comes there is needed soon after.
  template <int kNumChunks>
  __device__ __forceinline__ void load_part(int part, int block, uint32_t parity, int first_token,
                                            int num_boxes, int pages, int first_box) {
    static_assert(kNumChunks * (Tile::kBlock / 16) <= 32);
    const int box = lane_idx_ / kNumChunks;
    const int chunk = part * Tile::kChunksHalf + lane_idx_ % kNumChunks;
    // Boxes of pages that do not exist load nothing: the request has no tokens there.
    const int page = __shfl_sync(0xffffffffu, pages, first_box + box);
    const bool loads = box < num_boxes && page >= 0;
    const uint32_t existing = __popc(__ballot_sync(0xffffffffu, loads)) / kNumChunks;
    const uint32_t box_bytes = maps_.box_rows * 128;
    const uint32_t token = first_token + box * maps_.box_rows;
    const int slot = token - params_.page_size.divide(token) * params_.page_size.divisor;
    const uint32_t target = block_address(block) + chunk * Tile::kChunkBytes + box * box_bytes;
    const uint32_t full = address(control_.kv_full[block][chunk]);
    ptx::mbarrier_wait_soon(address(control_.kv_empty[block][part]), parity);
    if (box == 0) ptx::mbarrier_arrive_expect(full, existing * box_bytes);
    __syncwarp();
    if (loads) load_box(target, part, block, chunk, slot, page);
    __syncwarp();
  }

  // The CTAs of a cluster load a chunk each, for both. Pages are read once, or by clusters side by
  // side: they leave L2 before what later launches want.
  __device__ __forceinline__ void load_box(uint32_t target, int part, int block, int chunk,
                                           int slot, int page) const {
    const void* map = part == kRope ? &maps_.kpe : &maps_.ckv;
    const uint32_t full = address(control_.kv_full[block][chunk]);
    const int column = part == kRope ? 0 : chunk * 64;
    const uint64_t policy = ptx::l2_evict_first();
    if constexpr (kSharers == 1) {
      ptx::tma_load_hinted(target, map, full, column, slot, page, policy);
    } else if ((part == kRope ? block : chunk % 2) == static_cast<int>(ptx::cluster_rank())) {
      ptx::tma_load_multicast_hinted(target, map, full, column, slot, page, 3, policy);
    }
  }

  // ---- Copies by threads, of pages of any size ----

  // A copy is announced three parts later, so that four copies are in flight.
  __device__ __forceinline__ void copy_blocks(const MlaWorkItem& item) {
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      const int block = (token - item.kv_begin) / Tile::kBlock % 2;
      const uint32_t parity = next_parity(block);
      profile_.begin(MlaEvent::kLoad);
      // Lane i holds the offset of row i of the warp's sixteen rows.
      const int row_token = token + warp_idx_ * 16 + lane_idx_ % 16;
      int64_t ckv = -1, kpe = -1;
      const int page = MlaBoxPages::page_of(params_, item, row_token);
      if (page >= 0) {
        const int64_t slot =
            row_token - params_.page_size.divide(row_token) * params_.page_size.divisor;
        ckv = page * params_.ckv.stride_page + slot * params_.ckv.stride_token;
        kpe = page * params_.kpe.stride_page + slot * params_.kpe.stride_token;
      }
#pragma unroll 1
      for (int i = 0; i < (Tile::kDimKpe != 0 ? 3 : 2); ++i) {
        const int half = Tile::kRopeFirst ? i - 1 : i;  // in turn
        const int part = half < 0 ? kRope : block == 0 ? half : 1 - half;
        const uint32_t empty = address(control_.kv_empty[block][part]);
        if (!__all_sync(0xffffffffu, ptx::mbarrier_test(empty, parity))) {
          announce_all();  // its readers may be waiting for them
          ptx::mbarrier_wait(empty, parity);
        }
        if (part == kRope) {
          copy_rows<1>(block, Tile::kChunksCkv, params_.kpe.data, kpe);
        } else {
          const int first_chunk = part * Tile::kChunksHalf;
          const char* half = static_cast<const char*>(params_.ckv.data) + first_chunk * 128;
          copy_rows<Tile::kChunksHalf>(block, first_chunk, half, ckv);
        }
        ptx::cp_async_commit();
        announce<3>(earliest_);
        earliest_ = earlier_;
        earlier_ = latest_;
        latest_ = block * kNumParts + part;
      }
      profile_.end(MlaEvent::kLoad);
    }
    announce_all();
  }

  // `kChunks` of the warp's sixteen rows; lane i gives the offset in elements of row i from `base`.
  template <int kChunks>
  __device__ __forceinline__ void copy_rows(int block, int first_chunk, const void* base,
                                            int64_t offset) const {
    constexpr int kColumns = kChunks * 8, kPasses = 16 * kColumns / 32;
    const uint32_t target = block_address(block) + first_chunk * Tile::kChunkBytes;
    const char* const own = static_cast<const char*>(base) + lane_idx_ % kColumns * 16;
#pragma unroll 2
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * (32 / kColumns) + lane_idx_ / kColumns;
      const int64_t row_offset = __shfl_sync(0xffffffffu, offset, row);
      const bool exists = row_offset >= 0;
      ptx::cp_async_16(target + swizzled_offset<64>(warp_idx_ * 16 + row, lane_idx_ % kColumns),
                       exists ? own + row_offset * 2 : base, exists);
    }
  }

  // Announces a part (block * kNumParts + part) once at most `kPending` later groups are in flight.
  template <int kPending>
  __device__ __forceinline__ void announce(int& which) {
    if (which < 0) return;
    ptx::cp_async_wait<kPending>();
    ptx::async_proxy_fence();
    __syncwarp();
    const int block = which / kNumParts, part = which % kNumParts;
    if (lane_idx_ < (part == kRope ? 1 : Tile::kChunksHalf)) {
      ptx::mbarrier_arrive(address(control_.kv_full[block][part * Tile::kChunksHalf + lane_idx_]));
    }
    which = -1;
  }
  __device__ __forceinline__ void announce_all() {
    announce<2>(earliest_);
    announce<1>(earlier_);
    announce<0>(latest_);
  }

  const MlaParams& params_;
  const MlaSm90Params& maps_;
  MlaControl& control_;
  MlaProfile<Tile::kProfiled> profile_;
  const uint32_t shared_;
  int box_shift_;  // log2 of a box's tokens
  int warp_idx_, lane_idx_;
  int earliest_ = -1, earlier_ = -1, latest_ = -1;  // parts that are copied, not announced
  uint32_t phases_ = 3;        // bit b: the parity that says that block b is empty
  uint32_t query_parity_ = 1;  // the parity that says that the place of queries is empty
};

}  // namespace flashinfer
