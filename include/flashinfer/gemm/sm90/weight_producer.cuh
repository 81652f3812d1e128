// The warp that feeds the multiplying ones: the copy engine brings codes and scales as boxes, and
// the activations of each token as a piece of its row, wherever that is. Tokens of a CTA's only
// tile are neighbours, whose activations come as a box, too.
#pragma once

#include <flashinfer/gemm/sm90/weight_tile.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/tensor_map.h>
#include <flashinfer/ptx/tma.cuh>
#include <flashinfer/ptx/tma_multicast.cuh>

namespace flashinfer {

struct WeightStreamParams {
  WeightGemmParams gemm;
  ptx::EncodedTensorMap codes, scales, activations;
  uint32_t box_tokens;  // of a box of activations: a tile's that exist
};

template <typename Tile>
class WeightProducer {
 public:
  __device__ __forceinline__ WeightProducer(const WeightStreamParams& params, uint32_t shared,
                                            const uint32_t* table)
      : params_(params), schedule_(params.gemm, table), stages_(params.gemm.k), shared_(shared) {
    lane_idx_ = threadIdx.x % 32;
    policy_ = ptx::l2_evict_first();
  }

  __device__ __forceinline__ void run() {
    if constexpr (Tile::kOnce) {
      run_once();
      return;
    }
    uint32_t ahead = params_.gemm.starts_early ? load_ahead() : 0;
    WeightRing<Tile> ring;
    WeightGemmWork work;
    while (schedule_.next(work)) {
      const uint32_t tokens = tokens_of(work);
      const char* const row = row_of_lane(work);
      for (uint32_t i = 0; i < stages_.count; ++i) {
        if (stages_.begins_box(i)) ring.advance_box();
        ptx::mbarrier_wait(empty(ring.stage), ring.phase ^ 1);
        if (ahead == 0) {
          if (ptx::elect_one()) load_weights(work, tokens, i, ring);
          __syncwarp();
        } else {
          --ahead;
        }
        if (lane_idx_ < tokens) {
          ptx::bulk_load(shared_ + Tile::kOffsetActivations + ring.stage * Tile::kActivationBytes +
                             lane_idx_ * Tile::kTokenStride,
                         row + static_cast<uint64_t>(stages_.first + i) * Tile::kTokenBytes,
                         Tile::kTokenBytes, full(ring.stage));
        }
        ring.advance();
      }
    }
  }

 private:
  // One thread loads all stages of the CTA's only tile: a box of each operand. A loop over lanes,
  // which copy a token each, would take longer than the multiplication of a stage.
  __device__ __forceinline__ void run_once() {
    WeightGemmWork work;
    const bool has_work = schedule_.next(work);
    ptx::grid_dependency_wait();
    ptx::grid_launch_dependents();
    if (!has_work || !ptx::elect_one()) return;
    WeightRing<Tile> ring;
    for (uint32_t i = 0; i < stages_.count; ++i) {
      const uint32_t barrier = full(ring.stage), stage = stages_.first + i;
      const bool begins_box = stages_.begins_box(i);
      if (begins_box) ring.advance_box();
      ptx::mbarrier_wait_soon(empty(ring.stage), ring.phase ^ 1);
      ptx::mbarrier_arrive_expect(barrier, Tile::kStageBytes +
                                               (begins_box ? Tile::kScaleBytes : 0) +
                                               params_.box_tokens * Tile::kTokenBytes);
      ptx::tma_load_hinted(shared_ + ring.stage * Tile::kStageBytes, &params_.codes, barrier, 0,
                           work.column, stage * (Tile::kParts / 2), policy_);
      ptx::tma_load(shared_ + Tile::kOffsetActivations + ring.stage * Tile::kActivationBytes,
                    &params_.activations, barrier, 0, work.row, stage * (Tile::kParts * 2));
      if (begins_box) {
        ptx::tma_load(shared_ + Tile::kOffsetScales + ring.box * Tile::kScaleBytes, &params_.scales,
                      barrier, stage / Tile::kBoxStages * Tile::kBoxStep, work.column, 0);
      }
      ring.advance();
    }
  }

  __device__ __forceinline__ uint32_t full(uint32_t stage) const {
    return shared_ + Tile::kOffsetBarriers + stage * 8;
  }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const {
    return full(stage) + Tile::kStages * 8;
  }

  __device__ __forceinline__ static uint32_t tokens_of(const WeightGemmWork& work) {
    return min(work.row_end - work.row, static_cast<uint32_t>(Tile::kTokens));
  }

  // Activations of the token that this lane loads.
  __device__ __forceinline__ const char* row_of_lane(const WeightGemmWork& work) const {
    const WeightGemmParams& params = params_.gemm;
    uint32_t row = min(work.row + lane_idx_, work.row_end - 1);
    if (params.row_index != nullptr) {
      row = min(static_cast<uint32_t>(__ldg(params.row_index + row)), params.num_input_rows - 1);
    }
    return static_cast<const char*>(params.a) + static_cast<uint64_t>(row) * params.a_stride * 2;
  }

  // Fills the ring with weights of the first tile, then waits for the kernel that writes A. Gives
  // the number of stages.
  __device__ __forceinline__ uint32_t load_ahead() const {
    WeightSchedule<Tile> schedule = schedule_;
    WeightRing<Tile> ring;
    WeightGemmWork work;
    uint32_t count = 0;
    if (schedule.next(work)) {
      count = min(stages_.count, static_cast<uint32_t>(Tile::kStages));
      if (ptx::elect_one()) {
        for (uint32_t i = 0; i < count; ++i) {
          if (stages_.begins_box(i)) ring.advance_box();
          load_weights(work, tokens_of(work), i, ring);
          ring.advance();
        }
      }
    }
    ptx::grid_dependency_wait();
    __syncwarp();
    return count;
  }

  // Asks for codes and scales of stage `i`; also announces the bytes of the activations.
  __device__ __forceinline__ void load_weights(const WeightGemmWork& work, uint32_t tokens,
                                               uint32_t i, const WeightRing<Tile>& ring) const {
    const uint32_t barrier = full(ring.stage), stage = stages_.first + i;
    const bool begins_box = stages_.begins_box(i);
    ptx::mbarrier_arrive_expect(barrier, Tile::kStageBytes + (begins_box ? Tile::kScaleBytes : 0) +
                                             tokens * Tile::kTokenBytes);
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      const int row = work.column + box * (Tile::kGated ? params_.gemm.n / 2 : Tile::kBoxRows);
      ptx::tma_load_hinted(
          shared_ + ring.stage * Tile::kStageBytes + box * Tile::kBoxRows * Tile::kRowBytes,
          &params_.codes, barrier, stage * Tile::kRowBytes, row, work.group, policy_);
      if (!begins_box) continue;
      ptx::tma_load(shared_ + Tile::kOffsetScales + ring.box * Tile::kScaleBytes +
                        box * Tile::kBoxRows * Tile::kBoxBytes,
                    &params_.scales, barrier, stage / Tile::kBoxStages * Tile::kBoxStep, row,
                    work.group);
    }
  }

  const WeightStreamParams& params_;
  WeightSchedule<Tile> schedule_;
  const WeightStages<Tile> stages_;
  const uint32_t shared_;
  uint32_t lane_idx_;
  uint64_t policy_;
};

}  // namespace flashinfer
