// Plans decode on the device: writes the work list of scheduler/work.h from lengths in device
// memory, so that a captured graph follows lengths that no host has seen.
//
// The tiles of the portable kernel stand in a row, each with the cost of its KV tiles and one more
// for starting it. The row is cut into one share of equal cost per column. A tile's pieces lie in
// consecutive columns, so that each place in the list follows from the tile and the column, and all
// pieces are written at the same time: piece (tile t, column c) is the first item of its column if
// it continues a tile, or else item num_columns + t. Its slot is c + m, where m numbers the merges.
#pragma once

#include <cstdint>
#include <flashinfer/attention/device_plan_params.h>
#include <flashinfer/attention/kv_tiles.h>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>

namespace flashinfer {

inline constexpr int kPlanThreads = 1024;
struct PlannedTile {
  int32_t request, qo_begin, qo_len, kv_base, kv_len, row_begin, num_rows, kv_begin, kv_end;

  __device__ __forceinline__ int kv_tiles() const {
    return ceil_div(max(kv_end - kv_begin, 0), kTileKV);
  }
  // No cost: there is no such tile.
  __device__ __forceinline__ int cost() const { return num_rows > 0 ? kv_tiles() + 1 : 0; }
};

__device__ __forceinline__ int tiles_per_request(const DevicePlanParams& params) {
  return ceil_div(params.qo_len * params.group_size, params.tile_q);
}

// Reads tile `index` of all that the longest requests would have.
__device__ __forceinline__ PlannedTile read_planned_tile(const DevicePlanParams& params,
                                                         int index) {
  const int per_request = tiles_per_request(params);
  PlannedTile tile;
  const int request = tile.request = index / per_request;
  tile.qo_begin = request * params.qo_len;
  tile.qo_len = params.qo_len;
  if (params.qo_indptr != nullptr) {
    tile.qo_begin = min(max(params.qo_indptr[request], 0), params.qo_tokens);
    tile.qo_len = min(max(params.qo_indptr[request + 1] - tile.qo_begin, 0), params.qo_len);
  }
  tile.qo_len = min(tile.qo_len, params.qo_tokens - tile.qo_begin);
  int num_pages = params.pages_per_request;
  tile.kv_base = request * num_pages;
  if (params.kv_indptr != nullptr) {
    tile.kv_base = min(max(params.kv_indptr[request], 0), params.kv_entries);
    num_pages = min(max(params.kv_indptr[request + 1], tile.kv_base), params.kv_entries);
    num_pages -= tile.kv_base;
  }
  const int64_t room = int64_t{num_pages} * params.page_size;
  int64_t length = room;
  if (params.kv_len != nullptr) {
    length = params.kv_len[request];
  } else if (num_pages > 0) {
    length = room - params.page_size + params.last_page_len[request];
  }
  tile.kv_len = static_cast<int32_t>(min(max(length, int64_t{0}), min(room, int64_t{INT32_MAX})));

  tile.row_begin = (index - request * per_request) * params.tile_q;
  tile.num_rows = min(tile.qo_len * params.group_size - tile.row_begin, params.tile_q);
  const int shift = tile.kv_len - tile.qo_len;  // position of a query minus its index
  tile.kv_begin = 0;
  tile.kv_end = tile.kv_len;
  if (params.causal) {
    const int last = (tile.row_begin + tile.num_rows - 1) / params.group_size;
    tile.kv_end = min(tile.kv_end, last + shift + 1);
  }
  if (params.window_left >= 0) {
    const int first = tile.row_begin / params.group_size + shift - params.window_left;
    tile.kv_begin = max(first, 0) & -kTileKV;
  }
  if (tile.kv_begin >= tile.kv_end) tile.kv_begin = tile.kv_end = 0;
  return tile;
}

// The columns that a tile lies in, and where it is cut.
struct TileColumns {
  static constexpr int kLeastPiece = 2;  // KV tiles
  int start, num_tiles, share, first, last;

  // `start`: cost of the tiles before.
  __device__ __forceinline__ TileColumns(int start, int num_tiles, int share)
      : start(start), num_tiles(num_tiles), share(share) {
    first = start / share;
    last = (start + num_tiles) / share;
    if (first < last && cut(first + 1) == 0) ++first;
    if (first < last && cut(last) == num_tiles) --last;
  }
  // KV tiles before `column`. Pieces that are hardly worth a start go to their neighbours.
  __device__ __forceinline__ int cut(int column) const {
    const int tiles = column * share - start - 1;
    if (tiles < kLeastPiece) return 0;
    return tiles > num_tiles - kLeastPiece ? num_tiles : tiles;
  }
};

struct DevicePlan {
  int32_t* starts;   // [tiles + 1] cost of the tiles before
  int32_t* sources;  // [tiles] index for read_planned_tile()
  int num_tiles;
};

// Numbers the tiles that exist and sums their costs up.
__device__ __forceinline__ void scan_tiles(const DevicePlanParams& params, DevicePlan& plan) {
  struct Sum {
    int tiles, cost;
  };
  __shared__ Sum warp_sums[kPlanThreads / 32];
  const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
  const int most = params.batch_size * tiles_per_request(params);
  Sum before = {0, 0};
  for (int base = 0; base < most; base += kPlanThreads) {
    const int index = base + static_cast<int>(threadIdx.x);
    const int cost = index < most ? read_planned_tile(params, index).cost() : 0;
    Sum sum = {cost > 0 ? 1 : 0, cost};
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int tiles = __shfl_up_sync(0xffffffffu, sum.tiles, distance);
      const int costs = __shfl_up_sync(0xffffffffu, sum.cost, distance);
      if (lane_idx >= distance) sum.tiles += tiles, sum.cost += costs;
    }
    if (lane_idx == 31) warp_sums[warp_idx] = sum;
    __syncthreads();
    Sum all = before;
    for (int w = 0; w < kPlanThreads / 32; ++w) {
      if (w == warp_idx) sum.tiles += all.tiles, sum.cost += all.cost;
      all.tiles += warp_sums[w].tiles, all.cost += warp_sums[w].cost;
    }
    if (cost > 0) {
      plan.starts[sum.tiles - 1] = sum.cost - cost;
      plan.sources[sum.tiles - 1] = index;
    }
    before = all;
    __syncthreads();
  }
  plan.num_tiles = before.tiles;
  if (threadIdx.x == 0) plan.starts[before.tiles] = before.cost;
  __syncthreads();
}

// One warp writes the pieces of a tile, a column per lane.
__device__ __forceinline__ void write_tile(const DevicePlanParams& params, const DevicePlan& plan,
                                           int tile_idx, int share) {
  const auto columns_of = [&](int t) {
    const int start = plan.starts[t];
    return TileColumns(start, plan.starts[t + 1] - start - 1, share);
  };
  const PlannedTile tile = read_planned_tile(params, plan.sources[tile_idx]);
  const TileColumns columns = columns_of(tile_idx);
  const bool is_first_of_column = tile_idx == 0 || columns_of(tile_idx - 1).last < columns.first;
  const bool is_followed =
      tile_idx + 1 < plan.num_tiles && columns_of(tile_idx + 1).first == columns.last;
  const bool is_split = columns.first < columns.last;
  // A column ends in at most one tile that continues; with few tiles there are fewer merges.
  const int merge = plan.num_tiles <= params.num_merges ? tile_idx : columns.first;
  for (int c = columns.first + static_cast<int>(threadIdx.x) % 32; c <= columns.last; c += 32) {
    const bool continues = c > columns.first;
    WorkItem& item =
        params.items[continues || is_first_of_column ? c : params.num_columns + tile_idx];
    item.request = tile.request;
    item.kind = 0;
    item.qo_begin = tile.qo_begin;
    item.qo_len = tile.qo_len;
    item.kv_len = tile.kv_len;
    item.kv_base = tile.kv_base;
    item.row_begin = tile.row_begin;
    item.kv_begin = tile.kv_begin + (continues ? columns.cut(c) * kTileKV : 0);
    item.kv_end = c < columns.last ? tile.kv_begin + columns.cut(c + 1) * kTileKV : tile.kv_end;
    item.partial_slot = is_split ? c + merge : -1;
    item.next = c == columns.last && is_followed ? params.num_columns + tile_idx + 1 : -1;
    item.lists_taken = 0;
  }
  if (is_split && threadIdx.x % 32 == 0) {
    MergeItem& item = params.merges[merge];
    item.kind = 0;
    item.request = tile.request;
    item.qo_begin = tile.qo_begin;
    item.qo_len = tile.qo_len;
    item.row_begin = tile.row_begin;
    item.num_rows = tile.num_rows;
    item.slot_begin = columns.first + merge;
    item.slot_end = columns.last + merge + 1;
    item.kv_len = tile.kv_len;
    item.first_part = 0;
  }
}

// Grid (1). Shared memory: device_plan_shared_bytes().
__global__ void __launch_bounds__(kPlanThreads)
    device_plan_kernel(const __grid_constant__ DevicePlanParams params) {
  constexpr int kLeastShare = 4;  // KV tiles; with less, merging costs more than a part saves
  extern __shared__ __align__(16) int32_t plan_memory[];
  const int most = params.batch_size * tiles_per_request(params);
  DevicePlan plan{plan_memory, plan_memory + most + 1, 0};
  for (int i = threadIdx.x; i < params.num_columns; i += kPlanThreads) {
    params.items[i] = WorkItem{-1, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1, 0};
  }
  for (int i = threadIdx.x; i < params.num_merges; i += kPlanThreads) params.merges[i].num_rows = 0;
  scan_tiles(params, plan);
  const int share = max(ceil_div(plan.starts[plan.num_tiles], params.num_columns), kLeastShare);
  for (int t = threadIdx.x / 32; t < plan.num_tiles; t += kPlanThreads / 32) {
    write_tile(params, plan, t, share);
  }
}

#ifndef __CUDACC_RTC__

// A tile takes 8 bytes of shared memory, of which a launch has 48 KiB without a raised limit.
inline cudaError_t launch_device_plan(const DevicePlanParams& params, cudaStream_t stream) {
  const int rows = params.qo_len * params.group_size;
  const int most = params.batch_size * ceil_div(rows, params.tile_q);
  return launch_kernel(device_plan_kernel, dim3(1), dim3(kPlanThreads), (2 * most + 1) * 4, stream,
                       false, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
