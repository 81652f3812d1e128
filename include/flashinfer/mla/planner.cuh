// The common part of both planners of MLA on the device. They write the list of mla_work.h from
// lengths that only the device knows, as the planner on the host (scheduler/mla_plan.h) does: a
// launch of one CTA writes all of it (plan.cuh), or each CTA of the kernel its own items
// (own_plan.cuh).
//
// All units stand in a row, and the row is cut into one share per column of CTAs. Three ways to cut
// it are compared, and the one with the shortest longest column is taken:
//   kWhole     no unit is cut; each column gets as many units as the others
//   kWithCost  a unit is as long as its steps and the fixed cost of an item
//   kSteps     a unit is as long as its steps
// Where a unit begins follows from prefix sums, so that threads do not wait for one another.
#pragma once

#include <flashinfer/common/math.cuh>
#include <flashinfer/mla/plan_params.h>
#include <flashinfer/ptx/named_barrier.cuh>

namespace flashinfer {

// For the first kThreads threads of a CTA.
class MlaDevicePlan {
 public:
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kBarrier = 8;  // that no kernel uses for anything else
  static constexpr int kMaxColumns = kThreads, kMaxUnits = 1 << 20;
  // As for the planner on the host.
  static constexpr int kRows = kMlaTileRows, kStepTokens = 128, kItemCost = 5, kStepCost = 2;
  enum Cut { kWhole, kWithCost, kSteps, kNumCuts };

 protected:
  struct Sums {
    uint64_t lengths[kWarps], places[kWarps];  // of warps; a scan's sums are not written again
    int cost[kNumCuts][kMaxColumns];           // of columns, for each way to cut
    int longest[kNumCuts];
  };

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

  __device__ __forceinline__ MlaDevicePlan(const MlaPlanParams& params, Sums& sums)
      : params_(params),
        sums_(sums),
        num_units_(params.num_requests * params.units_of_request.divisor),
        num_columns_(params.num_ctas / params.lanes) {}

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
    const bool is_whole = cut == kWhole;
    const int share = cut == kWithCost ? share_with_cost_ : share_of_steps_;
    const bool has_cost = cut == kWithCost && unit.steps > 0;
    const int begin = axis(cut, before) + (has_cost ? kItemCost : 0);
    const int first = quotient(is_whole ? u * num_columns_ : begin, is_whole ? num_units_ : share);
    if (is_whole || unit.steps == 0) return {min(first, num_columns_ - 1), 1, begin, share};
    const int last = quotient(begin + (unit.steps - 1) * kStepCost, share);
    return {first, last - first + 1, begin, share};
  }

  // Neither is negative: half the instructions of a signed division.
  __device__ __forceinline__ static int quotient(unsigned a, unsigned b) {
    return static_cast<int>(a / b);
  }

  // First step of the unit's part `part`.
  __device__ __forceinline__ static int first_step(const Unit& unit, const Place& place, int part) {
    if (part == 0) return 0;
    if (part == place.parts) return unit.steps;
    return ceil_div((place.first_column + part) * place.share - place.begin, kStepCost);
  }

  // ---- The way to cut ----

  __device__ __forceinline__ void clear_costs() {
    for (int cut = 0; cut < kNumCuts; ++cut) sums_.cost[cut][threadIdx.x] = 0;
    if (threadIdx.x < kNumCuts) sums_.longest[threadIdx.x] = 0;
  }

  __device__ __forceinline__ void set_shares(uint64_t total) {
    share_with_cost_ =
        max(quotient(axis(kWithCost, total) + num_columns_ - 1, num_columns_), kStepCost);
    const int steps = static_cast<int>(total & kStepMask);
    share_of_steps_ = max(quotient(steps + num_columns_ - 1, num_columns_), 1) * kStepCost;
  }

  __device__ __forceinline__ void add_costs(int u, const Unit& unit, uint64_t before) {
    if (unit.num_tiles == 0) return;
#pragma unroll 1
    for (int cut = 0; cut < kNumCuts; ++cut) {
      const Place at = place(static_cast<Cut>(cut), u, unit, before);
      add_cost(cut, unit, at, 0);
      if (at.parts > 1) add_cost(cut, unit, at, at.parts - 1);
      if (at.parts > 2) {  // a column in between has nothing else
        atomicMax(&sums_.longest[cut], kItemCost + ceil_div(at.share, kStepCost) * kStepCost);
      }
    }
  }

  __device__ __forceinline__ void add_cost(int cut, const Unit& unit, const Place& at, int part) {
    const int steps = first_step(unit, at, part + 1) - first_step(unit, at, part);
    atomicAdd(&sums_.cost[cut][at.first_column + part], kItemCost + steps * kStepCost);
  }

  // Sets cut_ by the longest column of each way to cut; the costs have been added.
  __device__ __forceinline__ void choose() {
    synchronize();
#pragma unroll
    for (int cut = 0; cut < kNumCuts; ++cut) {
      const unsigned longest =
          __reduce_max_sync(0xffffffffu, static_cast<unsigned>(sums_.cost[cut][threadIdx.x]));
      if (threadIdx.x % 32 == 0) atomicMax(&sums_.longest[cut], static_cast<int>(longest));
    }
    synchronize();
    const int* const longest = sums_.longest;
    cut_ = longest[kWithCost] <= longest[kSteps] ? kWithCost : kSteps;
    if (longest[kWhole] <= longest[cut_]) cut_ = kWhole;
  }

  // ---- The list ----

  static constexpr int kPieceShift = 40, kSlotShift = 20;
  static constexpr uint64_t kMergeMask = (uint64_t{1} << kSlotShift) - 1;

  // Counts pieces above kPieceShift, slots above kSlotShift, and units to merge.
  __device__ __forceinline__ static uint64_t sum_of(const Place& place) {
    const uint64_t parts = place.parts;
    return parts << kPieceShift | (parts > 1 ? parts << kSlotShift | 1 : 0);
  }

  __device__ __forceinline__ static int first_piece(uint64_t places) {
    return static_cast<int>(places >> kPieceShift);
  }

  __device__ __forceinline__ static int first_slot(uint64_t places) {
    return static_cast<int>(places >> kSlotShift & kMergeMask);
  }

  __device__ __forceinline__ static int first_merge(uint64_t places) {
    return static_cast<int>(places & kMergeMask);
  }

  __device__ __forceinline__ void write_header(uint64_t places) const {
    *params_.header = {
        first_merge(places) * params_.lanes, first_piece(places) * params_.lanes, {}};
  }

  // A lane that has no tile gets an item without rows.
  __device__ __forceinline__ MlaWorkItem item_of(const Unit& unit, const Place& at, int part,
                                                 int lane, uint64_t places) const {
    const int lanes = params_.lanes;
    const int begin = first_step(unit, at, part) * kStepTokens;
    const int end = first_step(unit, at, part + 1) * kStepTokens;
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
    return item;
  }

  // A lane that has no tile gets a merge without rows.
  __device__ __forceinline__ MlaMerge merge_of(const Unit& unit, const Place& at, int lane,
                                               uint64_t places) const {
    const int lanes = params_.lanes;
    return {unit.qo_begin,
            unit.qo_len,
            (unit.first_tile + lane) * kRows,
            first_slot(places) * lanes + lane,
            at.parts,
            lanes,
            {}};
  }

  // ---- Threads together ----

  __device__ __forceinline__ static void synchronize() {
    ptx::named_barrier_sync(kBarrier, kThreads);
  }

  // The sum of the threads before, and of all.
  __device__ __forceinline__ static uint64_t scan(uint64_t value, uint64_t (&warps)[kWarps],
                                                  uint64_t& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    synchronize();
    uint64_t before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      if (i == warp) before = total;
      total += warps[i];
    }
    return before + sum - value;
  }

  const MlaPlanParams params_;
  Sums& sums_;
  const int num_units_, num_columns_;
  int share_with_cost_ = 1, share_of_steps_ = 1;
  Cut cut_ = kWhole;
};

}  // namespace flashinfer
