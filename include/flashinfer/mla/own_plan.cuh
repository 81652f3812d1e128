// CTAs that plan for themselves: each writes its own items where the launch of plan.cuh would.
//
// A thread has one unit, reads its length once and keeps it in registers: four barriers, and no
// walk over units. Code is fetched once for each launch, so that its size is time, too.
#pragma once

#include <flashinfer/mla/planner.cuh>

namespace flashinfer {

class MlaOwnPlanner : MlaDevicePlan {
 public:
  using MlaDevicePlan::kThreads;
  static_assert(kMlaMostOwnUnits <= kThreads);

  struct Shared {
    Sums sums;
    unsigned limits[kWarps];
  };

  __device__ __forceinline__ MlaOwnPlanner(const MlaPlanParams& params, Shared& shared)
      : MlaDevicePlan(params, shared.sums), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int u = threadIdx.x;
    Unit unit = {};
    if (u < num_units_) unit = read(u);
    clear_costs();
    uint64_t total, all_places;
    const uint64_t before = scan(length_of(unit), sums_.lengths, total);
    set_shares(total);
    add_costs(u, unit, before);
    choose();
    const Place at = place(cut_, u, unit, before);
    const int column = blockIdx.x / params_.lanes;
    const int lane = blockIdx.x - column * params_.lanes, part = column - at.first_column;
    const bool is_own = part >= 0 && part < at.parts;
    count_limits(min(max(part, 0), at.parts), is_own);
    const uint64_t places = scan(sum_of(at), sums_.places, all_places);
    unsigned limits = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) limits += shared_.limits[i];
    const int before_column = limits & kLimitMask, count = limits >> kLimitShift;
    const int first = before_column * params_.lanes + lane * count;
    if (u < 2) params_.cta_begin[blockIdx.x + u] = first + u * count;
    if (u == 0 && blockIdx.x == 0) write_header(all_places);
    if (!is_own) return;
    const int rank = first_piece(places) + part - before_column;
    params_.items[first + rank] = item_of(unit, at, part, lane, places);
    // Other CTAs that have a part write the same.
    if (at.parts == 1) return;
    params_.merges[first_merge(places) * params_.lanes + lane] = merge_of(unit, at, lane, places);
  }

 private:
  static constexpr int kLimitShift = 16;
  static constexpr unsigned kLimitMask = (1u << kLimitShift) - 1;

  // Pieces in the columns before the CTA's, and above kLimitShift those in its column.
  __device__ __forceinline__ void count_limits(int pieces_before, bool is_own) {
    const unsigned value = pieces_before | (is_own ? 1u << kLimitShift : 0);
    const unsigned sum = __reduce_add_sync(0xffffffffu, value);
    if (threadIdx.x % 32 == 0) shared_.limits[threadIdx.x / 32] = sum;
  }

  Shared& shared_;
};

// Plans for this CTA, which may begin with its items afterwards; called by all of its threads.
// `scratch`: shared memory for the planner, which no copy engine writes before.
__device__ __forceinline__ void plan_own_share(const MlaPlanParams& params, char* scratch) {
  if (threadIdx.x < MlaOwnPlanner::kThreads) {
    MlaOwnPlanner(params, *reinterpret_cast<MlaOwnPlanner::Shared*>(scratch)).run();
  }
  __syncthreads();
}

}  // namespace flashinfer
