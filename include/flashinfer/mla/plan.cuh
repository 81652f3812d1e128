// The launch that plans for another one, with one CTA.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/mla/planner.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

class MlaDevicePlanner : MlaDevicePlan {
 public:
  using MlaDevicePlan::kMaxUnits;
  using MlaDevicePlan::kThreads;

  struct Shared {
    Sums sums;
    uint64_t columns[kWarps];
    int pieces[kMaxColumns];  // of each column
    int begin[kMaxColumns];   // pieces of all columns before
  };

  __device__ __forceinline__ MlaDevicePlanner(const MlaPlanParams& params, Shared& shared)
      : MlaDevicePlan(params, shared.sums), shared_(shared) {
    const int units_of_thread = ceil_div(num_units_, kThreads);
    first_unit_ = min(num_units_, static_cast<int>(threadIdx.x) * units_of_thread);
    end_unit_ = min(num_units_, first_unit_ + units_of_thread);
  }

  __device__ __forceinline__ void run() {
    clear_costs();
    shared_.pieces[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < params_.num_ctas; i += kThreads) params_.counters[i] = {0, 0};
    uint64_t own = 0, total = 0;
    for (int u = first_unit_; u < end_unit_; ++u) own += length_of(read(u));
    own = scan(own, sums_.lengths, total);
    set_shares(total);
    uint64_t before = own;
    for (int u = first_unit_; u < end_unit_; ++u) {
      const Unit unit = read(u);
      add_costs(u, unit, before);
      before += length_of(unit);
    }
    choose();
    uint64_t places = 0, all_places = 0;
    walk(own, [&](int, const Unit&, const Place& place) { places += count(place); });
    places = scan(places, sums_.places, all_places);
    place_columns();
    write(own, places);
    if (threadIdx.x == 0) write_header(all_places);
  }

 private:
  // visit(u, unit, place) for the thread's units, as cut_ says.
  template <typename Visit>
  __device__ __forceinline__ void walk(uint64_t before, const Visit& visit) const {
    for (int u = first_unit_; u < end_unit_; ++u) {
      const Unit unit = read(u);
      visit(u, unit, place(cut_, u, unit, before));
      before += length_of(unit);
    }
  }

  // Adds the pieces to their columns.
  __device__ __forceinline__ uint64_t count(const Place& place) {
    for (int i = 0; i < place.parts; ++i) atomicAdd(&shared_.pieces[place.first_column + i], 1);
    return sum_of(place);
  }

  __device__ __forceinline__ void place_columns() {
    const int column = threadIdx.x, lanes = params_.lanes;
    const int pieces = column < num_columns_ ? shared_.pieces[column] : 0;
    uint64_t total;
    const int begin = static_cast<int>(scan(pieces, shared_.columns, total));
    shared_.begin[column] = begin;
    const int num_items = static_cast<int>(total) * lanes;
    for (int cta = column; cta <= params_.num_ctas; cta += kThreads) {
      if (cta >= num_columns_ * lanes) params_.cta_begin[cta] = num_items;
    }
    if (column < num_columns_) {
      for (int lane = 0; lane < lanes; ++lane) {
        params_.cta_begin[column * lanes + lane] = begin * lanes + lane * pieces;
      }
    }
    synchronize();
  }

  // Units of many parts are written by the warp together.
  __device__ __forceinline__ void write(uint64_t before, uint64_t places) {
    constexpr int kMany = 4;
    const int rounds = ceil_div(num_units_, kThreads);
    for (int i = 0; i < rounds; ++i) {
      const int u = first_unit_ + i;
      Unit unit = {};
      Place at = {0, 0, 0, 1};
      if (u < end_unit_) {
        unit = read(u);
        at = place(cut_, u, unit, before);
      }
      if (at.parts > 1) write_merges(unit, at, places);
      if (at.parts <= kMany) {
        for (int part = 0; part < at.parts; ++part) write_items(unit, at, part, places);
      }
      unsigned many = __ballot_sync(0xffffffffu, at.parts > kMany);
      for (; many != 0; many &= many - 1) {
        const int lane = __ffs(many) - 1;
        const int shared_u = __shfl_sync(0xffffffffu, u, lane);
        const uint64_t shared_before = __shfl_sync(0xffffffffu, before, lane);
        const uint64_t shared_places = __shfl_sync(0xffffffffu, places, lane);
        const Unit other = read(shared_u);
        const Place other_at = place(cut_, shared_u, other, shared_before);
        for (int part = threadIdx.x % 32; part < other_at.parts; part += 32) {
          write_items(other, other_at, part, shared_places);
        }
      }
      before += length_of(unit);
      places += sum_of(at);
    }
  }

  __device__ __forceinline__ void write_items(const Unit& unit, const Place& at, int part,
                                              uint64_t places) const {
    const int column = at.first_column + part, lanes = params_.lanes;
    const int rank = first_piece(places) + part - shared_.begin[column];
    const int first = shared_.begin[column] * lanes + rank;
    for (int lane = 0; lane < lanes; ++lane) {
      params_.items[first + lane * shared_.pieces[column]] = item_of(unit, at, part, lane, places);
    }
  }

  __device__ __forceinline__ void write_merges(const Unit& unit, const Place& at,
                                               uint64_t places) const {
    const int lanes = params_.lanes, first = first_merge(places) * lanes;
    for (int lane = 0; lane < lanes; ++lane) {
      params_.merges[first + lane] = merge_of(unit, at, lane, places);
    }
  }

  Shared& shared_;
  int first_unit_, end_unit_;
};

__global__ void __launch_bounds__(MlaDevicePlanner::kThreads)
    mla_plan_kernel(const __grid_constant__ MlaPlanParams params) {
  __shared__ MlaDevicePlanner::Shared shared;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  MlaDevicePlanner(params, shared).run();
}

#ifndef __CUDACC_RTC__

inline cudaError_t launch_mla_plan(const MlaPlanParams& params, bool enable_pdl,
                                   cudaStream_t stream) {
  return launch_kernel(mla_plan_kernel, dim3(1), dim3(MlaDevicePlanner::kThreads), 0, stream,
                       enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
