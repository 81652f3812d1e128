// Plans an MLA launch on the device, from lengths that only the device knows: writes the list of
// mla_work.h, as the planner on the host (scheduler/mla_plan.h) does, with one CTA.
//
// All units stand in a row, and the row is cut into one share per column of CTAs. Three ways to cut
// it are compared, and the one with the shortest longest column is taken:
//   kWhole     no unit is cut; each column gets as many units as the others
//   kWithCost  a unit is as long as its steps and the fixed cost of an item
//   kSteps     a unit is as long as its steps
// Where a unit begins follows from prefix sums, so that threads do not wait for one another.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/mla/plan_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

class MlaDevicePlanner {
 public:
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kMaxColumns = kThreads, kMaxUnits = 1 << 20;
  // As for the planner on the host.
  static constexpr int kRows = kMlaTileRows, kStepTokens = 128, kItemCost = 5, kStepCost = 2;
  enum Cut { kWhole, kWithCost, kSteps, kNumCuts };

  struct Shared {
    uint64_t warp_sums[kWarps];
    int cost[kNumCuts][kMaxColumns];
    int longest[kNumCuts];
    int pieces[kMaxColumns];  // of each column
    int begin[kMaxColumns];   // pieces of all columns before
  };

  __device__ __forceinline__ MlaDevicePlanner(const MlaPlanParams& params, Shared& shared)
      : params_(params), shared_(shared) {
    num_units_ = params.num_requests * params.units_of_request.divisor;
    num_columns_ = params.num_ctas / params.lanes;
    const int units_of_thread = ceil_div(num_units_, kThreads);
    first_unit_ = min(num_units_, static_cast<int>(threadIdx.x) * units_of_thread);
    end_unit_ = min(num_units_, first_unit_ + units_of_thread);
  }

  __device__ __forceinline__ void run() {
    clear();
    uint64_t own = 0, total = 0;
    for (int u = first_unit_; u < end_unit_; ++u) own += length_of(read(u));
    own = scan(own, total);
    share_with_cost_ = max(ceil_div(axis(kWithCost, total), num_columns_), kStepCost);
    const int steps = static_cast<int>(total & kStepMask);
    share_of_steps_ = max(ceil_div(steps, num_columns_), 1) * kStepCost;
    choose(own);
    uint64_t places = 0, all_places = 0;
    walk(own, [&](int, const Unit&, const Place& place) { places += count_of(place); });
    places = scan(places, all_places);
    place_columns();
    write(own, places);
    if (threadIdx.x == 0) {
      const int num_merges = static_cast<int>(all_places & kMergeMask) * params_.lanes;
      *params_.header = {num_merges, params_.cta_begin[params_.num_ctas], {}};
    }
  }

 private:
  struct Unit {
    int request, qo_begin, qo_len, kv_len, first_tile;
    int num_tiles;  // 0: the unit does not exist
    int steps;
  };
  // Columns first_column ... first_column + parts - 1 have the unit; its first step stands at
  // `begin` of the row.
  struct Place {
    int first_column, parts, begin, share;
  };

  // ---- Requests ----

  __device__ __forceinline__ Unit read(int u) const {
    Unit unit;
    unit.request = params_.units_of_request.divide(u);
    unit.first_tile = (u - unit.request * params_.units_of_request.divisor) * params_.lanes;
    if (params_.qo_indptr == nullptr) {
      unit.qo_begin = unit.request * params_.qo_len;
      unit.qo_len = params_.qo_len;
    } else {
      unit.qo_begin = min(max(params_.qo_indptr[unit.request], 0), params_.num_tokens);
      const int end = min(params_.qo_indptr[unit.request + 1], params_.num_tokens);
      unit.qo_len = max(end - unit.qo_begin, 0);
    }
    const int sharers = params_.sharers.divisor, entry = params_.sharers.divide(unit.request);
    const int hidden = sharers - 1 - (unit.request - entry * sharers);
    unit.kv_len = min(max(params_.kv_lens[entry] - hidden, 0), params_.most_tokens);
    const int tiles = ceil_div(rows_of(unit), kRows);
    unit.num_tiles = min(max(tiles - unit.first_tile, 0), params_.lanes);
    const int row_end = min((unit.first_tile + unit.num_tiles) * kRows, rows_of(unit));
    unit.steps = unit.num_tiles == 0 ? 0 : ceil_div(visible(unit, row_end), kStepTokens);
    return unit;
  }

  __device__ __forceinline__ int rows_of(const Unit& unit) const {
    return unit.qo_len * static_cast<int>(params_.num_heads.divisor);
  }

  // Tokens that the last row before `row_end` sees.
  __device__ __forceinline__ int visible(const Unit& unit, int row_end) const {
    if (!params_.causal) return unit.kv_len;
    const int token = params_.num_heads.divide(row_end - 1);
    return max(0, unit.kv_len - unit.qo_len + token + 1);
  }

  // ---- The row of units ----

  static constexpr int kUnitShift = 40;
  static constexpr uint64_t kStepMask = (uint64_t{1} << kUnitShift) - 1;

  // Counts units above kUnitShift, and steps below.
  __device__ __forceinline__ static uint64_t length_of(const Unit& unit) {
    return unit.num_tiles == 0 ? 0 : (uint64_t{1} << kUnitShift) + unit.steps;
  }

  __device__ __forceinline__ static int axis(Cut cut, uint64_t length) {
    const int items = cut == kWithCost ? static_cast<int>(length >> kUnitShift) * kItemCost : 0;
    return items + static_cast<int>(length & kStepMask) * kStepCost;
  }

  __device__ __forceinline__ Place place(Cut cut, int u, const Unit& unit, uint64_t before) const {
    if (unit.num_tiles == 0) return {0, 0, 0, 1};
    if (cut == kWhole) {
      return {static_cast<int>(int64_t{u} * num_columns_ / num_units_), 1, 0, 1};
    }
    const int share = cut == kWithCost ? share_with_cost_ : share_of_steps_;
    const int start = axis(cut, before);
    if (unit.steps == 0) return {min(start / share, num_columns_ - 1), 1, start, share};
    const int begin = start + (cut == kWithCost ? kItemCost : 0);
    const int first = begin / share, last = (begin + (unit.steps - 1) * kStepCost) / share;
    return {first, last - first + 1, begin, share};
  }

  // First step of the unit's part `part`.
  __device__ __forceinline__ static int first_step(const Unit& unit, const Place& place, int part) {
    if (part == 0) return 0;
    if (part == place.parts) return unit.steps;
    return ceil_div((place.first_column + part) * place.share - place.begin, kStepCost);
  }

  // visit(u, unit, place) for the thread's units, as cut_ says.
  template <typename Visit>
  __device__ __forceinline__ void walk(uint64_t before, const Visit& visit) const {
    for (int u = first_unit_; u < end_unit_; ++u) {
      const Unit unit = read(u);
      visit(u, unit, place(cut_, u, unit, before));
      before += length_of(unit);
    }
  }

  // Sets cut_ by the longest column of each way to cut.
  __device__ __forceinline__ void choose(uint64_t before) {
    for (int u = first_unit_; u < end_unit_; ++u) {
      const Unit unit = read(u);
#pragma unroll
      for (int cut = 0; cut < kNumCuts; ++cut) {
        if (unit.num_tiles == 0) break;
        const Place at = place(static_cast<Cut>(cut), u, unit, before);
        add_cost(cut, unit, at, 0);
        if (at.parts > 1) add_cost(cut, unit, at, at.parts - 1);
        if (at.parts > 2) {  // a column in between has nothing else
          atomicMax(&shared_.longest[cut], kItemCost + ceil_div(at.share, kStepCost) * kStepCost);
        }
      }
      before += length_of(unit);
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < num_columns_) {
      for (int cut = 0; cut < kNumCuts; ++cut) {
        atomicMax(&shared_.longest[cut], shared_.cost[cut][threadIdx.x]);
      }
    }
    __syncthreads();
    const int* const longest = shared_.longest;
    cut_ = longest[kWithCost] <= longest[kSteps] ? kWithCost : kSteps;
    if (longest[kWhole] <= longest[cut_]) cut_ = kWhole;
  }

  __device__ __forceinline__ void add_cost(int cut, const Unit& unit, const Place& at, int part) {
    const int steps = first_step(unit, at, part + 1) - first_step(unit, at, part);
    atomicAdd(&shared_.cost[cut][at.first_column + part], kItemCost + steps * kStepCost);
  }

  // ---- The list ----

  static constexpr int kPieceShift = 40, kSlotShift = 20;
  static constexpr uint64_t kMergeMask = (uint64_t{1} << kSlotShift) - 1;

  // Counts pieces above kPieceShift, slots above kSlotShift, and units to merge; adds the pieces to
  // their columns.
  __device__ __forceinline__ uint64_t count_of(const Place& place) {
    for (int i = 0; i < place.parts; ++i) atomicAdd(&shared_.pieces[place.first_column + i], 1);
    return sum_of(place);
  }
  __device__ __forceinline__ static uint64_t sum_of(const Place& place) {
    const uint64_t parts = place.parts;
    return parts << kPieceShift | (parts > 1 ? parts << kSlotShift | 1 : 0);
  }

  __device__ __forceinline__ void place_columns() {
    const int column = threadIdx.x, lanes = params_.lanes;
    const int pieces = column < num_columns_ ? shared_.pieces[column] : 0;
    uint64_t total;
    const int begin = static_cast<int>(scan(pieces, total));
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
    __syncthreads();
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

  __device__ __forceinline__ static int first_slot(uint64_t places) {
    return static_cast<int>(places >> kSlotShift & kMergeMask);
  }

  __device__ __forceinline__ static int first_merge(uint64_t places) {
    return static_cast<int>(places & kMergeMask);
  }

  // Lanes that have no tile get an item without rows.
  __device__ __forceinline__ void write_items(const Unit& unit, const Place& at, int part,
                                              uint64_t places) const {
    const int column = at.first_column + part, lanes = params_.lanes;
    const int rank = static_cast<int>(places >> kPieceShift) + part - shared_.begin[column];
    const int first = shared_.begin[column] * lanes + rank;
    const int begin = first_step(unit, at, part) * kStepTokens;
    const int end = first_step(unit, at, part + 1) * kStepTokens;
    for (int lane = 0; lane < lanes; ++lane) {
      const int row_begin = (unit.first_tile + lane) * kRows;
      const int row_end = min(row_begin + kRows, rows_of(unit));
      MlaWorkItem item;
      item.qo_begin = unit.qo_begin;
      item.qo_len = unit.qo_len;
      item.kv_base = unit.request * params_.table_stride;
      item.kv_len = unit.kv_len;
      item.row_begin = row_begin;
      item.kv_end = lane < unit.num_tiles ? min(end, visible(unit, row_end)) : 0;
      item.kv_begin = min(begin, item.kv_end);
      const bool is_part = at.parts > 1 && lane < unit.num_tiles;
      item.slot = static_cast<int16_t>(is_part ? (first_slot(places) + part) * lanes + lane : -1);
      item.merge = static_cast<int16_t>(is_part ? first_merge(places) * lanes + lane : -1);
      params_.items[first + lane * shared_.pieces[column]] = item;
    }
  }

  // A lane that has no tile gets a merge without rows.
  __device__ __forceinline__ void write_merges(const Unit& unit, const Place& at,
                                               uint64_t places) const {
    const int lanes = params_.lanes, first = first_merge(places) * lanes;
    for (int lane = 0; lane < lanes; ++lane) {
      params_.merges[first + lane] = {unit.qo_begin,
                                      unit.qo_len,
                                      (unit.first_tile + lane) * kRows,
                                      first_slot(places) * lanes + lane,
                                      at.parts,
                                      lanes,
                                      {}};
    }
  }

  // ---- Threads together ----

  __device__ __forceinline__ void clear() {
    for (int cut = 0; cut < kNumCuts; ++cut) shared_.cost[cut][threadIdx.x] = 0;
    shared_.pieces[threadIdx.x] = 0;
    if (threadIdx.x < kNumCuts) shared_.longest[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < params_.num_ctas; i += kThreads) params_.counters[i] = {0, 0};
    __syncthreads();
  }

  // The sum of the threads before, and of all.
  __device__ __forceinline__ uint64_t scan(uint64_t value, uint64_t& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = value;
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) shared_.warp_sums[warp] = sum;
    __syncthreads();
    uint64_t before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      if (i == warp) before = total;
      total += shared_.warp_sums[i];
    }
    __syncthreads();
    return before + sum - value;
  }

  const MlaPlanParams& params_;
  Shared& shared_;
  int num_units_, num_columns_, first_unit_, end_unit_;
  int share_with_cost_ = 1, share_of_steps_ = 1;
  Cut cut_ = kWhole;
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
