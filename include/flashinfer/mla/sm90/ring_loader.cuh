// Brings KV to the ring of the MLA kernels for few rows: a warp by boxes of the copy engine or, if
// pages are no multiples of 16 tokens, a warpgroup 16 bytes a thread at a time.
#pragma once

#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/mla_params.h>
#include <flashinfer/mla/sm90/boxes.cuh>
#include <flashinfer/mla/sm90/share.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/tma.cuh>
#include <flashinfer/ptx/tma_multicast.cuh>

namespace flashinfer {

template <typename Tile>
class MlaRingLoader {
  static constexpr int kWarps = 4;

 public:
  // Threads of the warpgroup that load, each of which arrives at the barrier of a copied block.
  __device__ __forceinline__ static int num_threads(const MlaSm90Params& params) {
    return params.box_rows == 0 ? 32 * kWarps : 32;
  }
  __device__ __forceinline__ static int num_arrivals(const MlaSm90Params& params) {
    return params.box_rows == 0 ? 32 * kWarps : 1;
  }

  __device__ __forceinline__ MlaRingLoader(const MlaSm90Params& params, char* shared,
                                           const uint64_t* full, const uint64_t* empty)
      : params_(params.mla),
        maps_(params),
        full_(ptx::shared_address(full)),
        empty_(ptx::shared_address(empty)),
        shared_(ptx::shared_address(shared)),
        warp_idx_(threadIdx.x / 32 % kWarps),
        lane_idx_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    const MlaShare share = MlaShare::guess(params_);
    MlaWorkItem item = share.first;
    if (maps_.box_rows != 0) {
      MlaBoxPages pages = MlaBoxPages::find(maps_, item, lane_idx_);
      ptx::grid_dependency_wait();
      for (int i = share.begin; i < share.end; ++i) {
        if (i != share.begin) {
          item = params_.items[i];
          pages = MlaBoxPages::find(maps_, item, lane_idx_);
        }
        for (int pass = 0; pass < passes(item); ++pass) load_boxes(item, pages.of(params_));
      }
    } else {
      ptx::grid_dependency_wait();
      for (int i = share.begin; i < share.end; ++i) {
        if (i != share.begin) item = params_.items[i];
        for (int pass = 0; pass < passes(item); ++pass) copy_blocks(item);
      }
    }
  }

 private:
  __device__ __forceinline__ int passes(const MlaWorkItem& item) const {
    return mla_passes<Tile>(mla_tile_rows(params_, item));
  }

  __device__ __forceinline__ uint32_t full() const { return full_ + stage_ * 8; }
  __device__ __forceinline__ void wait_for_place() const {
    ptx::mbarrier_wait_soon(empty_ + stage_ * 8, parity_ ^ 1);
  }
  __device__ __forceinline__ void next_stage() {
    if (++stage_ == Tile::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // ---- Boxes ----

  // A lane asks for a box. Boxes of pages that do not exist load nothing: the request
  // has no tokens there.
  __device__ __forceinline__ void load_boxes(const MlaWorkItem& item, const MlaBoxPages& found) {
    const int box_rows = maps_.box_rows, boxes = Tile::kBlock / box_rows;  // of a block
    const int own_box = lane_idx_ / Tile::kChunks, chunk = lane_idx_ % Tile::kChunks;
    const bool is_rope = chunk >= Tile::kChunksCkv;
    const void* const map = is_rope ? &maps_.kpe : &maps_.ckv;
    const int column = is_rope ? 0 : chunk * Tile::kChunkColumns;
    const uint32_t box_bytes = box_rows * (is_rope ? Tile::kRopeRowBytes : 128);
    const uint32_t place = shared_ + chunk * Tile::kChunkBytes + own_box * box_bytes;
    // Bytes of all chunks of a box.
    const uint32_t all_bytes = box_rows * (Tile::kStageBytes / Tile::kBlock);
    const uint64_t policy = ptx::l2_evict_first();  // pages are read once
    int pages = found.first, next_pages = found.next, box = 0;
#pragma unroll 1
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      const int page = __shfl_sync(0xffffffffu, pages, (box + own_box) % 32);
      const bool loads = own_box < boxes && page >= 0;
      const uint32_t bytes = __popc(__ballot_sync(0xffffffffu, loads && chunk == 0)) * all_bytes;
      const uint32_t at = token + own_box * box_rows;
      const int slot = at - params_.page_size.divide(at) * params_.page_size.divisor;
      const uint32_t barrier = full();
      wait_for_place();
      if (lane_idx_ == 0) ptx::mbarrier_arrive_expect(barrier, bytes);
      __syncwarp();
      if (loads) {
        ptx::tma_load_hinted(place + stage_ * Tile::kStageBytes, map, barrier, column, slot, page,
                             policy);
      }
      __syncwarp();
      next_stage();
      box += boxes;
      if (box == 32) {
        box = 0;
        pages = next_pages;
        next_pages =
            MlaBoxPages::page_of(params_, item, token + Tile::kBlock + (32 + lane_idx_) * box_rows);
      }
    }
  }

  // ---- Copies by threads, of pages of any size ----

  // A warp copies some rows of a block; lane i knows where its row i % kWarpRows lies. Rows beyond
  // the item repeat its last one, and pages that do not exist the cache's last one.
  static constexpr int kWarpRows = Tile::kBlock / kWarps;

  __device__ __forceinline__ void copy_blocks(const MlaWorkItem& item) {
    if (item.kv_begin >= item.kv_end) return;
    const int own_row = warp_idx_ * kWarpRows + lane_idx_ % kWarpRows;
    const auto token_of = [&](int block_token) {
      return static_cast<uint32_t>(min(block_token + own_row, item.kv_end - 1));
    };
    const auto find_page = [&](int block_token) {
      return params_.kv_indices[item.kv_base + params_.page_size.divide(token_of(block_token))];
    };
    uint32_t page = find_page(item.kv_begin);
#pragma unroll 1
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      const uint32_t at = token_of(token);
      const int64_t slot = at - params_.page_size.divide(at) * params_.page_size.divisor;
      const int64_t number = min(page, params_.num_pages - 1);
      const int64_t ckv = number * params_.ckv.stride_page + slot * params_.ckv.stride_token;
      const int64_t kpe = number * params_.kpe.stride_page + slot * params_.kpe.stride_token;
      page = find_page(token + Tile::kBlock);
      wait_for_place();
      if (params_.num_pages != 0) {
        copy_rows<typename Tile::Ckv, Tile::kChunksCkv * 128>(params_.ckv.data, ckv, 0);
        if constexpr (Tile::kDimKpe != 0) {
          copy_rows<typename Tile::Kpe, Tile::kRopeRowBytes>(params_.kpe.data, kpe,
                                                             Tile::kChunksCkv * Tile::kChunkBytes);
        }
      }
      ptx::cp_async_arrive(full());
      next_stage();
    }
  }

  // The warp's rows, to `begin` of the stage; lane i gives the offset in elements of row i from
  // `base`.
  template <typename T, int kBytes>
  __device__ __forceinline__ void copy_rows(const void* base, int64_t offset, int begin) const {
    constexpr int kUnits = kBytes / 16, kColumns = kUnits < 32 ? kUnits : 32;  // at once
    constexpr int kRows = 32 / kColumns, kTimes = kUnits / kColumns;
    const int column = lane_idx_ % kColumns, own_row = lane_idx_ / kColumns;
    const char* const first = static_cast<const char*>(base) + column * 16;
    const uint32_t place = shared_ + stage_ * Tile::kStageBytes + begin;
#pragma unroll
    for (int i = 0; i < kWarpRows; i += kRows) {
      const int row = warp_idx_ * kWarpRows + i + own_row;
      const char* const source =
          first + __shfl_sync(0xffffffffu, offset, i + own_row) * static_cast<int>(sizeof(T));
      const uint32_t target = place + (kBytes == 64 ? swizzled_offset_64(row, column)
                                                    : swizzled_offset<Tile::kBlock>(row, column));
#pragma unroll
      for (int time = 0; time < kTimes; ++time) {
        ptx::cp_async_16(target + time * (kColumns / 8) * Tile::kChunkBytes,
                         source + time * kColumns * 16, true);
      }
    }
  }

  const MlaParams& params_;
  const MlaSm90Params& maps_;
  const uint32_t full_, empty_;  // barriers of the stages
  const uint32_t shared_;
  const int warp_idx_, lane_idx_;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace flashinfer
