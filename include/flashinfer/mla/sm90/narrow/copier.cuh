// The warpgroup that copies KV of the narrow MLA kernel to the ring, 16 bytes a thread at a time.
#pragma once

#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/mla_params.h>
#include <flashinfer/mla/sm90/cache_rows.cuh>
#include <flashinfer/mla/sm90/narrow/tile.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/mbarrier.cuh>

namespace flashinfer {

template <typename Tile>
class MlaNarrowCopier {
  using Rows = MlaCacheRows<typename Tile::Kpe>;
  static constexpr int kWarpRows = Rows::kWarpRows;
  static_assert(4 * kWarpRows == Tile::kBlock);

 public:
  __device__ __forceinline__ MlaNarrowCopier(const MlaParams& params, char* shared,
                                             MlaNarrowControl<Tile>& control)
      : params_(params), control_(control), shared_(ptx::shared_address(shared)) {
    warp_idx_ = threadIdx.x / 32 % 4;
    lane_idx_ = threadIdx.x % 32;
  }

  __device__ __forceinline__ void run() {
    const int end = params_.cta_begin[blockIdx.x + 1];
    for (int i = params_.cta_begin[blockIdx.x]; i < end; ++i) {
      const MlaWorkItem item = params_.items[i];
      const int passes = mla_passes<Tile>(mla_tile_rows(params_, item));
      for (int pass = 0; pass < passes; ++pass) copy_blocks(item);
    }
  }

 private:
  __device__ __forceinline__ void copy_blocks(const MlaWorkItem& item) {
    if (item.kv_begin >= item.kv_end) return;
    const Rows rows(params_);
    int page = rows.find_page(item, item.kv_begin);
#pragma unroll 1
    for (int token = item.kv_begin; token < item.kv_end; token += Tile::kBlock) {
      const typename Rows::Places places = rows.find(item, page, token);
      page = rows.find_page(item, token + Tile::kBlock);
      ptx::mbarrier_wait(ptx::shared_address(&control_.empty[stage_]), parity_ ^ 1);
      if (params_.num_pages != 0) {
        const uint32_t target =
            shared_ + stage_ * Tile::kStageBytes + warp_idx_ * kWarpRows * Tile::kPitch;
        copy_rows<Tile::kDimCkv>(target, params_.ckv.data, places.ckv);
        copy_rows<Tile::kRopeBytes>(target + Tile::kDimCkv, params_.kpe.data, places.kpe);
      }
      ptx::cp_async_arrive(ptx::shared_address(&control_.full[stage_]));
      if (++stage_ == Tile::kStages) {
        stage_ = 0;
        parity_ ^= 1;
      }
    }
  }

  // `kBytes` of each of the warp's rows; lane i gives the place of row i.
  template <int kBytes>
  __device__ __forceinline__ void copy_rows(uint32_t target, const void* base, int unit) const {
    if constexpr (kBytes != 0) {
      constexpr int kLanes = kBytes / 16, kRows = 32 / kLanes;  // of a row; at once
      const auto* own = static_cast<const uint4*>(base) + lane_idx_ % kLanes;
      target += lane_idx_ / kLanes * Tile::kPitch + lane_idx_ % kLanes * 16;
#pragma unroll
      for (int row = 0; row < kWarpRows; row += kRows) {
        const int from = __shfl_sync(0xffffffffu, unit, row + lane_idx_ / kLanes);
        ptx::cp_async_16(target + row * Tile::kPitch, own + int64_t{from}, true);
      }
    }
  }

  const MlaParams& params_;
  MlaNarrowControl<Tile>& control_;
  const uint32_t shared_;
  int warp_idx_, lane_idx_;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace flashinfer
