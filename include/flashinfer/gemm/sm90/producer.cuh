// The warpgroup that feeds the tensor cores: one thread asks the copy engine for both operands, one
// warp copies scales. Where rows of A are gathered, all threads copy them (gather.cuh).
//
// Measurements, also of what lost: docs/tuning/gemm.md.
#pragma once

#include <flashinfer/gemm/sm90/gather.cuh>
#include <flashinfer/gemm/sm90/scheduler.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/mbarrier_cluster.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/tensor_map.h>
#include <flashinfer/ptx/tma.cuh>
#include <flashinfer/ptx/tma_multicast.cuh>

namespace flashinfer {

struct GemmKernelParams {
  GemmParams gemm;
  GemmSchedule schedule;
  ptx::EncodedTensorMap a, b, d, a_scale;
  bool stores_boxes;    // the copy engine can write D
  uint32_t box_rows_a;  // rows of A that a CTA loads at once: few where there are only few
  uint32_t parts_a;     // CTAs that load a part of A for those that share it
  GemmScaleCopy scale_copy;
  uint32_t box_rows_scale;  // rows whose scales are copied at once, as box_rows_a
};

// Blocks of k that a CTA sums: all, or its part of a split product.
template <typename Tile>
struct GemmBlocks {
  uint32_t first, count;

  __device__ __forceinline__ explicit GemmBlocks(uint32_t k) {
    const uint32_t blocks = ceil_div<uint32_t>(k, Tile::kTileK);
    if constexpr (Tile::kSplits == 1) {
      first = 0;
      count = blocks;
    } else {
      // Whole units of the blocks that are multiplied together.
      constexpr uint32_t kUnit = Tile::kBlockScales ? Tile::kFour : 1;
      const uint32_t split = GemmPlace<Tile>().split, units = ceil_div(blocks, kUnit);
      const uint32_t end = units * (split + 1) / Tile::kSplits * kUnit;
      first = units * split / Tile::kSplits * kUnit;
      count = (end < blocks ? end : blocks) - first;
    }
  }
};

template <typename Tile>
class GemmProducer {
 public:
  __device__ __forceinline__ GemmProducer(const GemmKernelParams& params, uint32_t shared,
                                          const GemmTableEntry* table)
      : params_(params),
        scheduler_(params.gemm, params.schedule, table),
        blocks_(params.gemm.k),
        shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int thread_idx = threadIdx.x - Tile::kConsumerThreads;
    const int warp_idx = __shfl_sync(0xffffffffu, thread_idx / 32, 0);
    if constexpr (Tile::kGathers) {
      load<true>(thread_idx);
    } else {
      if (warp_idx == 0) load<false>(thread_idx);
      if (Tile::kBlockScales && warp_idx == 1) load_scales(thread_idx % 32);
    }
  }

 private:
  __device__ __forceinline__ uint32_t full(uint32_t stage) const {
    return shared_ + Tile::kOffsetControl + stage * 8;
  }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const {
    return full(stage) + Tile::kStages * 8;
  }

  // One thread of the first warp loads both operands. Where rows are gathered, all threads of the
  // warpgroup load them, and the scales.
  template <bool kGathers>
  __device__ __forceinline__ void load(int thread_idx) {
    const GemmParams& params = params_.gemm;
    GemmRing<Tile::kStages> ring;
    ScaleRing scale_ring;
    const uint64_t normal = ptx::l2_evict_normal();
    // Weights that few rows read leave L2 first, so that they stream faster (docs/tuning/gemm.md).
    const bool streams = Tile::kGrouped ? Tile::kSwap : params_.schedule.num_rows == 1;
    const uint64_t policy = streams ? ptx::l2_evict_first() : normal;
    const uint32_t bytes_a = params_.parts_a * params_.box_rows_a * 128;
    GemmGather<Tile> gather(params);
    uint32_t ahead = 0;
    bool waits = false;
    const auto load_tile = [&](const GemmWork& work) {
      uint32_t row = work.row;
      if (Tile::kSharedA > 1) row += place_.column * (Tile::kTileRows / Tile::kSharedA);
      if constexpr (kGathers) gather.find(work, thread_idx);
      GemmScaleSource<Tile> scales(params, params_.scale_copy, work, thread_idx % 32);
      const auto load_block = [&](uint32_t i) {
        ptx::mbarrier_wait_soon(empty(ring.stage), ring.phase ^ 1);
        const uint32_t barrier = full(ring.stage), block = blocks_.first + i;
        const int x = block * Tile::kTileK;
        const uint32_t a = shared_ + ring.stage * Tile::kStageBytes;
        if (thread_idx < 32 && ptx::elect_one()) {
          if (ahead == 0) {
            ptx::mbarrier_arrive_expect(barrier, bytes_b(work) + (kGathers ? 0 : bytes_a));
          }
          // As late as can be: what follows are few instructions, which have yet to be fetched.
          if (Tile::kFewRows && waits) ptx::grid_dependency_wait();
          waits = false;
          if (!kGathers && place_.column < params_.parts_a) {
            copy_box<Tile::kSharedA, Tile::kTileRows>(params_.a, a, barrier, x, row, work.batch,
                                                      place_.column, place_.readers_of_a(), normal);
          }
          if (ahead == 0) load_columns(work, a + Tile::kBytesA, barrier, x, policy);
        }
        if (ahead > 0) --ahead;
        if constexpr (kGathers) {
          gather.copy(a, block, thread_idx);
          if (Tile::kBlockScales && thread_idx / 32 == 1 && i % Tile::kScaleBlocks == 0) {
            copy_scales(scales, work, i, scale_ring);
          }
          ptx::mbarrier_arrive_copies(barrier);
        }
        ring.advance();
      };
      if constexpr (Tile::kFewRows) {
#pragma unroll 1
        for (uint32_t i = 0; i < blocks_.count; ++i) load_block(i);
      } else {
        for (uint32_t i = 0; i < blocks_.count; ++i) load_block(i);
      }
    };
    GemmWork work;
    if constexpr (Tile::kFewRows) {
      bool exists = scheduler_.next(work);
      if (exists && params.starts_early) ahead = load_weights(work, thread_idx, policy);
      waits = true;
      for (; exists; exists = scheduler_.next(work)) load_tile(work);
    } else {
      // Weights are asked for before the rows' numbers are read, too.
      if (kGathers || params.starts_early) ahead = load_weights_ahead(thread_idx, policy);
      while (scheduler_.next(work)) load_tile(work);
    }
    // Waits until the other CTAs have read what this one loaded for them.
    for (int i = 0; Tile::kMulticast > 1 && i < Tile::kStages; ++i) {
      ptx::mbarrier_wait_soon(empty(ring.stage), ring.phase ^ 1);
      ring.advance();
    }
  }

  // Fills the ring with weights of the first tile, then waits for the kernel that writes A, if that
  // was not done before. Gives the number of stages.
  __device__ __forceinline__ uint32_t load_weights_ahead(int thread_idx, uint64_t policy) const {
    GemmScheduler<Tile> scheduler = scheduler_;
    GemmWork work;
    uint32_t count = 0;
    if (scheduler.next(work)) count = load_weights(work, thread_idx, policy);
    ptx::grid_dependency_wait();
    return count;
  }

  // Fills the ring with weights of the first tile, and gives the number of stages.
  __device__ __forceinline__ uint32_t load_weights(const GemmWork& work, int thread_idx,
                                                   uint64_t policy) const {
    const uint32_t count = blocks_.count < Tile::kStages ? blocks_.count : Tile::kStages;
    if (thread_idx < 32 && ptx::elect_one()) {
      const uint32_t bytes_a = Tile::kGathers ? 0 : params_.parts_a * params_.box_rows_a * 128;
      for (uint32_t i = 0; i < count; ++i) {
        ptx::mbarrier_arrive_expect(full(i), bytes_b(work) + bytes_a);
        load_columns(work, shared_ + i * Tile::kStageBytes + Tile::kBytesA, full(i),
                     (blocks_.first + i) * Tile::kTileK, policy);
      }
    }
    return count;
  }

  __device__ __forceinline__ static uint32_t bytes_b(const GemmWork& work) {
    return Tile::kThirds ? work.thirds * Tile::kBoxRowsB * 128 : Tile::kBytesB;
  }

  __device__ __forceinline__ void load_columns(const GemmWork& work, uint32_t target,
                                               uint32_t barrier, int x, uint64_t policy) const {
#pragma unroll
    for (int box = 0; box < Tile::kBoxesB; ++box) {
      if (Tile::kThirds && box >= static_cast<int>(work.thirds)) break;
      uint32_t row = work.row_of_b<Tile>(box * Tile::kBoxRowsB, params_.gemm.n);
      if (Tile::kSharedB > 1) row += place_.row * (Tile::kBoxRowsB / Tile::kSharedB);
      copy_box<Tile::kSharedB, Tile::kBoxRowsB>(params_.b, target + box * Tile::kBoxRowsB * 128,
                                                barrier, x, row, work.group, place_.row,
                                                place_.readers_of_b(), policy);
    }
  }

  // Loads a box of an operand; if CTAs share it, loads part `part` for all of `readers`.
  template <int kShared, int kRows>
  __device__ __forceinline__ static void copy_box(const ptx::EncodedTensorMap& map, uint32_t target,
                                                  uint32_t barrier, int x, int y, int z,
                                                  uint32_t part, uint32_t readers,
                                                  uint64_t policy) {
    if constexpr (kShared > 1) {
      ptx::tma_load_multicast(target + part * (kRows / kShared) * 128, &map, barrier, x, y, z,
                              static_cast<uint16_t>(readers));
    } else {
      ptx::tma_load_hinted(target, &map, barrier, x, y, z, policy);
    }
  }

  using ScaleRing = GemmRing<Tile::kBlockScales ? Tile::kScaleStages : 1>;

  __device__ __forceinline__ void load_scales(int lane_idx) {
    if (!Tile::kFewRows && params_.gemm.starts_early) ptx::grid_dependency_wait();
    ScaleRing ring;
    GemmWork work;
    while (scheduler_.next(work)) {
      GemmScaleSource<Tile> scales(params_.gemm, params_.scale_copy, work, lane_idx);
      for (uint32_t i = 0; i < blocks_.count; i += Tile::kScaleBlocks) {
        copy_scales(scales, work, i, ring);
      }
    }
  }

  // Copies the scales of the blocks from `first` on that share a stage.
  __device__ __forceinline__ void copy_scales(const GemmScaleSource<Tile>& scales,
                                              const GemmWork& work, uint32_t first,
                                              ScaleRing& ring) const {
    const uint32_t barriers = shared_ + Tile::kOffsetControl + (2 * Tile::kStages + 2) * 8;
    const uint32_t barrier = barriers + ring.stage * 8;
    ptx::mbarrier_wait_soon(barrier + 4 * 8, ring.phase ^ 1);
    const uint32_t target = shared_ + Tile::kOffsetScales + ring.stage * Tile::kScaleBytes;
    const uint32_t block = blocks_.first + first, left = blocks_.count - first;
    if constexpr (Tile::kFewRows) ptx::grid_dependency_wait();
    const uint32_t count = left < Tile::kScaleBlocks ? left : Tile::kScaleBlocks;
    // Columns' come from memory, which takes longer than L2, where the rows' often are.
    if constexpr (Tile::kFewRows) scales.copy(target, block, count);
    if (!Tile::kGathers && copies_box(params_.scale_copy) && ptx::elect_one()) {
      const bool along_k = params_.scale_copy == GemmScaleCopy::kBoxAlongK;
      ptx::mbarrier_expect(barrier, params_.box_rows_scale * Tile::kScaleBlocks * 4);
      ptx::tma_load(target, &params_.a_scale, barrier, along_k ? block : work.row,
                    along_k ? work.row : block, work.batch);
    }
    if (Tile::kFewRows && params_.scale_copy == GemmScaleCopy::kWhole && ptx::elect_one()) {
      const GemmScaleMatrix& a = params_.gemm.a_scale;
      const uint32_t bytes = params_.box_rows_scale * static_cast<uint32_t>(a.stride_row) * 4;
      ptx::mbarrier_expect(barrier, bytes);
      ptx::bulk_load(target, a.data + work.batch * a.stride_batch + work.row * a.stride_row, bytes,
                     barrier);
    }
    if constexpr (!Tile::kFewRows) scales.copy(target, block, count);
    ptx::mbarrier_arrive_copies(barrier);
    ring.advance();
  }

  const GemmKernelParams& params_;
  GemmScheduler<Tile> scheduler_;
  const GemmBlocks<Tile> blocks_;
  const GemmPlace<Tile> place_;
  const uint32_t shared_;
};

}  // namespace flashinfer
