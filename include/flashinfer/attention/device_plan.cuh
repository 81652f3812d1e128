// Plans decode on the device: writes the work list of scheduler/work.h from lengths in device
// memory, so that several launches follow lengths that no host has seen. tile_row.cuh says how.
#pragma once

#include <flashinfer/attention/tile_row.cuh>
#include <flashinfer/common/launch.cuh>

namespace flashinfer {

inline constexpr int kPlanThreads = 128;

// The first item of a column is items[column], and that of tile t after another one is items[number
// of columns + t].
__device__ __forceinline__ void write_column(const DevicePlanParams& params, int column) {
  const int length = all_by_lanes(params) ? lane_length(params) : 0;
  ColumnItems items(params, TileRow(params, length), column);
  WorkItem item, following;
  int number = 0, place = column;
  if (!items.next(item, number)) item = WorkItem{-1, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1, 0};
  while (true) {
    const int owner = items.owner();
    const bool is_followed = item.request >= 0 && items.next(following, number);
    if (is_followed) item.next = params.num_columns + number;
    if (threadIdx.x % 32 == owner) params.items[place] = item;
    if (!is_followed) return;
    place = item.next;
    item = following;
  }
}

// One warp for each column.
__global__ void __launch_bounds__(kPlanThreads)
    device_plan_kernel(const __grid_constant__ DevicePlanParams params) {
  const int column = blockIdx.x * (kPlanThreads / 32) + threadIdx.x / 32;
  if (column < params.num_columns) write_column(params, column);
  if (column < params.num_merges) {
    const MergeItem merge = find_merge(params, column);
    if (threadIdx.x % 32 == 0) params.merges[column] = merge;
  }
}

#ifndef __CUDACC_RTC__

inline cudaError_t launch_device_plan(const DevicePlanParams& params, cudaStream_t stream) {
  const int columns =
      params.num_columns > params.num_merges ? params.num_columns : params.num_merges;
  return launch_kernel(device_plan_kernel, dim3(ceil_div(columns, kPlanThreads / 32)),
                       dim3(kPlanThreads), 0, stream, false, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
