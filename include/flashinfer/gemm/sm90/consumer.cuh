// The warpgroups that multiply. Each multiplies 64 rows of the left operand (kReps times) by all
// rows of the right one and keeps the sums in registers.
//
// 16-bit operands are summed by the tensor cores alone. Sums of 128 8-bit products are added to the
// tile's sums in float32, times their scales: while one warpgroup does that, the other multiplies.
#pragma once

#include <flashinfer/gemm/sm90/epilogue.cuh>
#include <flashinfer/gemm/sm90/producer.cuh>
#include <flashinfer/gemm/sm90/promotion.cuh>
#include <flashinfer/gemm/sm90/split.cuh>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

template <typename Tile>
class GemmConsumer {
  static constexpr int kReps = Tile::kReps, kTiles = Tile::kTiles;
  using Sums = float[kReps][kTiles][4];
  using Scales = GemmScales<Tile>;

 public:
  __device__ __forceinline__ GemmConsumer(const GemmKernelParams& params, uint32_t shared,
                                          const GemmTableEntry* table)
      : params_(params),
        scheduler_(params.gemm, params.schedule, table),
        blocks_(params.gemm.k),
        shared_(shared) {
    // The compiler then knows that all lanes of a warp have the same descriptors.
    thread_.warpgroup_idx = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (Tile::kBlockScales) {
      along_k_ = params.scale_copy == GemmScaleCopy::kAlongK ||
                 params.scale_copy == GemmScaleCopy::kBoxAlongK ||
                 params.scale_copy == GemmScaleCopy::kWhole;
      is_whole_ = params.scale_copy == GemmScaleCopy::kWhole;
      if (is_whole_) row_pitch_ = static_cast<uint32_t>(params.gemm.a_scale.stride_row) * 4;
    }
    thread_.warp_idx = threadIdx.x % 128 / 32;
    thread_.lane_idx = threadIdx.x % 32;
    if constexpr (Tile::kMulticast > 1) {
      remote_empty_ = ptx::remote_address(full(0) + Tile::kStages * 8,
                                          place_.loader(thread_.lane_idx % Tile::kReaders));
    }
    const uint32_t left = shared + (Tile::kSwap ? Tile::kBytesA : 0);
    const uint32_t right = shared + (Tile::kSwap ? 0 : Tile::kBytesA);
    left_ = ptx::wgmma_operand(left + Tile::left_group(thread_.warpgroup_idx) * kReps * 64 * 128);
    right_ = ptx::wgmma_operand(right +
                                Tile::right_group(thread_.warpgroup_idx) * Tile::kRightRows * 128);
  }

  __device__ __forceinline__ void run() {
    if (Tile::kFewRows && !params_.gemm.starts_early) ptx::grid_dependency_wait();
    GemmEpilogue<Tile> epilogue(params_, shared_);
    GemmSplit<Tile> split(shared_);
    GemmWork work;
    if constexpr (Tile::kPromotes && !kOverlaps) find_scales();
    while (scheduler_.next(work)) {
      Sums sums;
      if (Tile::kPromotes || blocks_.count == 0) clear(sums);
      if constexpr (Tile::kPromotes) {
        if (Tile::kThirds && work.thirds == 1) {
          multiply_promoting<kTiles / 3>(sums);
        } else if (Tile::kThirds && work.thirds == 2) {
          multiply_promoting<kTiles / 3 * 2>(sums);
        } else {
          multiply_promoting<kTiles / Tile::kParts>(sums);
        }
      } else {
        multiply(sums);
      }
      if constexpr (Tile::kSplits > 1) split.add_up(sums, !scheduler_.has_next());
      epilogue.store(work, sums);
    }
    epilogue.finish();
  }

 private:
  __device__ __forceinline__ uint32_t full(uint32_t stage) const {
    return shared_ + Tile::kOffsetControl + stage * 8;
  }

  // Tells that this warp has read a stage of its own CTA and, where operands are shared, of others.
  __device__ __forceinline__ void release(uint32_t stage) const {
    if constexpr (Tile::kMulticast > 1) {
      if (thread_.lane_idx < Tile::kReaders)
        ptx::mbarrier_arrive_relaxed(remote_empty_ + stage * 8);
    } else {
      if (thread_.lane_idx == 0) ptx::mbarrier_arrive(full(stage) + Tile::kStages * 8);
    }
  }

  __device__ __forceinline__ static void clear(Sums& sums) {
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[rep][j][i] = 0.f;
      }
    }
  }

  struct Operands {
    uint64_t left, right;
  };

  // Products over 32 bytes of k, of this warpgroup's left rows `rep` and as many right ones as
  // there are sums, from `right_row` on.
  template <int kCount>
  __device__ __forceinline__ static void step(float (&sums)[kCount][4], const Operands& operands,
                                              int rep, int right_row, int step, bool accumulate) {
    ptx::wgmma<typename Tile::Left, false, typename Tile::Right>(
        sums, ptx::wgmma_advance(operands.left, step * 32 + rep * 64 * 128),
        ptx::wgmma_advance(operands.right, step * 32 + right_row * 128), accumulate);
  }

  __device__ __forceinline__ Operands operands(uint32_t stage) const {
    const uint32_t offset = stage * Tile::kStageBytes;
    return {ptx::wgmma_advance(left_, offset), ptx::wgmma_advance(right_, offset)};
  }

  __device__ __forceinline__ void await_stage() const {
    ptx::mbarrier_wait_soon(full(ring_.stage), ring_.phase);
    // Threads have written the gathered rows, and the tensor cores read them next.
    if constexpr (Tile::kGathers) ptx::async_proxy_fence();
  }

  __device__ __forceinline__ void multiply(Sums& sums) {
    uint32_t previous = 0;
    for (uint32_t i = 0; i < blocks_.count; ++i) {
      await_stage();
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int rep = 0; rep < kReps; ++rep) {
          step(sums[rep], operands(ring_.stage), rep, 0, k, i > 0 || k > 0);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (i > 0) release(previous);
      previous = ring_.stage;
      ring_.advance();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) ptx::wgmma_done(sums[rep]);
    if (blocks_.count > 0) release(previous);
  }

  // The products of a block and what they are promoted with.
  struct Pending {
    float products[kReps][kTiles][4];
    Scales scales[kReps];
    uint32_t stage;
  };

  // Whether there are registers for the products of two blocks.
  static constexpr bool kOverlaps =
      Tile::kParts == 1 && !Tile::kThirds && (kReps == 1 || kReps * kTiles <= 8);
  static_assert(kOverlaps || !Tile::kFewRows);

  // Block after block: products of one are promoted while those of the next are made, where there
  // are registers for both, else while the other warpgroup multiplies.
  template <int kCount>
  __device__ __forceinline__ void multiply_promoting(Sums& sums) {
    const uint32_t count = blocks_.count;
    if constexpr (!kOverlaps) {
      // Other warpgroups alone keep the tensor cores busy between the end of a block's products and
      // the start of the next ones, so little but the sums may stand there: the place of scales is
      // found once in four blocks.
      float products[kCount][4];
      uint32_t left = count;
      if (left > 0) await_found();
#pragma unroll 1
      for (; left >= Tile::kScaleBlocks; left -= Tile::kScaleBlocks) {
        multiply_block<kCount, false>(sums, products, 0);
#pragma unroll
        for (int at = 1; at < Tile::kScaleBlocks - 1; ++at) {
          await_stage();
          multiply_block<kCount, false>(sums, products, at);
        }
        await_stage();
        const bool is_found = multiply_block<kCount, true>(sums, products, Tile::kScaleBlocks - 1);
        if (!is_found && left > Tile::kScaleBlocks) await_found();
      }
#pragma unroll 1
      for (uint32_t at = 0; at < left; ++at) {
        await_stage();
        multiply_block<kCount, false>(sums, products, at);
      }
      if (left > 0) {
        release_scales(Tile::kScaleBlocks - 1);
        find_scales();
      }
    } else if (count > 0) {
      Pending pending[2];
      begin(pending[0], 0);
      uint32_t i = 0;
      if constexpr (kFours) {
        if (along_k_) i = multiply_fours(sums, pending, count);
      }
      for (; i + 2 < count; i += 2) {
        begin(pending[1], i + 1);
        ptx::wgmma_wait<kReps>();
        end(sums, pending[0], i);
        begin(pending[0], i + 2);
        ptx::wgmma_wait<kReps>();
        end(sums, pending[1], i + 1);
      }
      if (i + 1 < count) {
        begin(pending[1], i + 1);
        ptx::wgmma_wait<kReps>();
        end(sums, pending[0], i);
        ptx::wgmma_wait<0>();
        end(sums, pending[1], i + 1);
      } else {
        ptx::wgmma_wait<0>();
        end(sums, pending[0], i);
      }
    }
  }

  // Block `at` of the four whose scales have come together; it has been loaded. After the last one,
  // finds the next scales and tells whether they and the next block have been loaded, too.
  template <int kCount, bool kIsLast>
  __device__ __forceinline__ bool multiply_block(Sums& sums, float (&products)[kCount][4],
                                                 uint32_t at) {
    bool is_found = false;
    const uint32_t stage = ring_.stage;
    const Operands operands = this->operands(stage);
    const uint32_t rows = scales_ + at * (along_k_ ? 4 : Tile::kTileRows * 4);
    const uint32_t columns = column_scales_ + at * Tile::kColumnScaleBytes;
#pragma unroll
    for (int i = 0; i < kReps * Tile::kParts; ++i) {
      const int rep = i / Tile::kParts, part = i % Tile::kParts;
      const bool is_last = i == kReps * Tile::kParts - 1;
      start(products, operands, rep, part);
      Scales scales;
      scales.load(thread_, rep, part, rows, columns, along_k_ ? 16 : 4);
      scales.combine();
      if (is_last) ring_.advance();
      if (is_last && kIsLast) {
        if (!Scales::kReadsRight) release_scales(at);
        find_scales();
        is_found = ptx::mbarrier_test(full(ring_.stage), ring_.phase);
        if constexpr (Tile::kGathers) ptx::async_proxy_fence();  // as in await_stage()
        if (Tile::kBlockScales) is_found &= ptx::mbarrier_test(found_scales_, found_phase_);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(products);
      if (is_last) release(stage);
      scales.promote(sums[rep], part * kCount, products);
    }
    if (kIsLast && Scales::kReadsRight) release_scales(at);
    return is_found;
  }

  // Four blocks of k whose scales come together, in neighbouring stages.
  struct Four {
    uint32_t first, stage, scales, columns;
    Operands operands;
  };
  static constexpr int kFour = Tile::kFour;
  static constexpr bool kFours = Tile::kBlockScales && Tile::kStages % kFour == 0;

  // All but the last blocks by four at a time: few sums take fewer instructions than finding the
  // place of every block does. The products of block 0 are under way, and then those of the block
  // whose number it gives.
  __device__ __forceinline__ uint32_t multiply_fours(Sums& sums, Pending (&pending)[2],
                                                     uint32_t count) {
    uint32_t i = 0;
    if ((ring_.stage - 1) % kFour != 0) return i;
    Four four = {0, ring_.stage - 1, scales_, column_scales_, operands(ring_.stage - 1)};
    four_phase_ = ring_.phase;
    for (; i + kFour < count; i += kFour) {
#pragma unroll
      for (int at = 0; at < kFour - 1; ++at) {
        begin(pending[(at + 1) % 2], four, at + 1);
        ptx::wgmma_wait<kReps>();
        end(sums, pending[at % 2], four, at);
      }
      const Four last = four;
      four = next_four(four);
      begin(pending[0], four, 0);
      ptx::wgmma_wait<kReps>();
      end(sums, pending[1], last, kFour - 1);
    }
    ring_.stage = four.stage + 1;
    ring_.phase = four_phase_;
    pending[0].stage = four.stage;
    return i;
  }

  // Finds the scales of the next four blocks.
  __device__ __forceinline__ Four next_four(const Four& four) {
    const uint32_t first = four.first + kFour;
    await_scales(first);
    uint32_t stage = four.stage + kFour;
    if (stage == Tile::kStages) {
      stage = 0;
      four_phase_ ^= 1;
    }
    return {first, stage, scales_, column_scales_, operands(stage)};
  }

  __device__ __forceinline__ void begin(Pending& pending, const Four& four, int at) const {
    ptx::mbarrier_wait_soon(full(four.stage) + at * 8, four_phase_);
    if constexpr (Tile::kGathers) ptx::async_proxy_fence();  // as in await_stage()
    const Operands operands = {ptx::wgmma_advance(four.operands.left, at * Tile::kStageBytes),
                               ptx::wgmma_advance(four.operands.right, at * Tile::kStageBytes)};
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) {
      pending.scales[rep].load(thread_, rep, 0, four.scales + at * 4,
                               four.columns + at * Tile::kColumnScaleBytes, row_pitch());
      start(pending.products[rep], operands, rep, 0);
    }
  }

  __device__ __forceinline__ void end(Sums& sums, Pending& pending, const Four& four, int at) {
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) ptx::wgmma_done(pending.products[rep]);
    release(four.stage + at);
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) {
      pending.scales[rep].combine();
      pending.scales[rep].promote(sums[rep], 0, pending.products[rep]);
    }
    if (at == kFour - 1) release_scales(four.first + at);
  }

  template <int kCount>
  __device__ __forceinline__ static void start(float (&products)[kCount][4],
                                               const Operands& operands, int rep, int part) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) step(products, operands, rep, part * kCount * 8, k, k > 0);
    ptx::wgmma_commit();
  }

  // The products of block `i`, in the background.
  __device__ __forceinline__ void begin(Pending& pending, uint32_t i) {
    await_stage();
    await_scales(i);
    pending.stage = ring_.stage;
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) {
      pending.scales[rep].load(thread_, rep, 0, scales_, column_scales_,
                               along_k_ ? row_pitch() : 4);
      start(pending.products[rep], operands(ring_.stage), rep, 0);
    }
    ring_.advance();
  }

  __device__ __forceinline__ void end(Sums& sums, Pending& pending, uint32_t i) {
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) ptx::wgmma_done(pending.products[rep]);
    release(pending.stage);
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) {
      pending.scales[rep].combine();
      pending.scales[rep].promote(sums[rep], 0, pending.products[rep]);
    }
    release_scales(i);
  }

  // Bytes from a row's scales to the next row's, where those of a row are neighbours.
  __device__ __forceinline__ uint32_t row_pitch() const { return Tile::kFewRows ? row_pitch_ : 16; }

  // Finds the scales of block `i` among those that begin at `first`. Rows of boxes are swizzled by
  // 16 bytes, by their number's two bits above the lowest: the same ones for a lane's rows.
  __device__ __forceinline__ void place_scales(uint32_t first, uint32_t i) {
    const uint32_t at = i % Tile::kScaleBlocks;
    const uint32_t column = is_whole_ ? blocks_.first + i : at;
    const uint32_t lane_idx = thread_.lane_idx;
    const uint32_t swizzle = is_whole_ ? 0 : Tile::kSwap ? lane_idx % 4 : lane_idx / 8;
    first_scales_ = first;
    scales_ = first + (along_k_ ? ((column / 4) ^ swizzle) * 16 + column % 4 * 4
                                : at * Tile::kTileRows * 4);
    column_scales_ =
        first + Tile::kScaleBlocks * Tile::kTileRows * 4 + at * Tile::kColumnScaleBytes;
  }

  // Finds the scales of block `i`; one barrier guards those that are copied together.
  __device__ __forceinline__ void await_scales(uint32_t i) {
    if constexpr (!Tile::kBlockScales) return;
    if (i % Tile::kScaleBlocks == 0) {
      find_scales();
      ptx::mbarrier_wait_soon(found_scales_, found_phase_);
      if constexpr (Tile::kFewRows) place_scales(scales_, i);
    } else if constexpr (Tile::kFewRows) {
      place_scales(first_scales_, i);
    } else {
      scales_ += along_k_ ? 4 : Tile::kTileRows * 4;
      column_scales_ += Tile::kColumnScaleBytes;
    }
  }

  // The place of the next four blocks' scales, which may not have come yet.
  __device__ __forceinline__ void find_scales() {
    if constexpr (!Tile::kBlockScales) return;
    found_scales_ = scale_barrier(scale_ring_.stage);
    found_phase_ = scale_ring_.phase;
    scales_ = shared_ + Tile::kOffsetScales + scale_ring_.stage * Tile::kScaleBytes;
    column_scales_ = scales_ + Tile::kScaleBlocks * Tile::kTileRows * 4;
    scale_ring_.advance();
  }

  // Waits for the scales that were found, and for the next block.
  __device__ __forceinline__ void await_found() const {
    if constexpr (Tile::kBlockScales) ptx::mbarrier_wait_soon(found_scales_, found_phase_);
    await_stage();
  }

  __device__ __forceinline__ void release_scales(uint32_t i) {
    if constexpr (!Tile::kBlockScales) return;
    if (i % Tile::kScaleBlocks != Tile::kScaleBlocks - 1 && i + 1 != blocks_.count) return;
    __syncwarp();
    if (thread_.lane_idx == 0) ptx::mbarrier_arrive(scale_barrier(4 + released_scales_));
    if (++released_scales_ == Tile::kScaleStages) released_scales_ = 0;
  }

  __device__ __forceinline__ uint32_t scale_barrier(uint32_t i) const {
    return full(2 * Tile::kStages + 2 + i);
  }

  const GemmKernelParams& params_;
  GemmScheduler<Tile> scheduler_;
  const GemmBlocks<Tile> blocks_;
  const GemmPlace<Tile> place_;
  const uint32_t shared_;
  uint32_t remote_empty_ = 0;  // barrier of the first stage in the CTA that this lane tells
  uint64_t left_, right_;
  GemmThread thread_;
  GemmRing<Tile::kStages> ring_;
  uint32_t four_phase_ = 0;
  GemmRing<Tile::kBlockScales ? Tile::kScaleStages : 1> scale_ring_;
  // Scales of the latest block; a row's blocks are neighbours, or a block's rows.
  uint32_t scales_ = 0, column_scales_ = 0, first_scales_ = 0;
  uint32_t found_scales_ = 0, found_phase_ = 0;  // their barrier
  bool along_k_ = false, is_whole_ = false;
  uint32_t row_pitch_ = Tile::kScaleBlocks * 4;
  uint32_t released_scales_ = 0;
};

}  // namespace flashinfer
