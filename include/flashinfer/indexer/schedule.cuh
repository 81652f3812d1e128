// Shares of the units of all requests: part i begins with unit floor(i total / parts).
#pragma once

#include <cstdint>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/indexer/mqa_logits_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

namespace detail {

__device__ __forceinline__ int mqa_units(const MqaScheduleParams& params, int request) {
  if (request >= params.batch_size) return 0;
  return ceil_div(max(params.seq_lens[request * params.seq_lens_stride], 0), kMqaUnit);
}

}  // namespace detail

// One warp; a lane has one request at a time.
__global__ void __launch_bounds__(32)
    mqa_schedule_kernel(const __grid_constant__ MqaScheduleParams params) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int lane = threadIdx.x;
  int64_t total = 0;
  for (int request = lane; request < params.batch_size; request += 32) {
    total += detail::mqa_units(params, request);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    total += __shfl_xor_sync(0xffffffffu, total, offset);
  }
  const int64_t parts = params.parts;
  int64_t before = 0;
  for (int first = 0; first < params.batch_size && total > 0; first += 32) {
    const int request = first + lane;
    const int64_t count = detail::mqa_units(params, request);
    int64_t end = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, end, offset);
      if (lane >= offset) end += other;
    }
    end += before;
    const int64_t begin = end - count;
    const int64_t last = (end * parts + total - 1) / total;
    for (int64_t part = (begin * parts + total - 1) / total; part < last; ++part) {
      params.schedule[2 * part] = request;
      params.schedule[2 * part + 1] = static_cast<int32_t>(part * total / parts - begin);
    }
    before = __shfl_sync(0xffffffffu, end, 31);
  }
  for (int64_t part = total > 0 ? parts + lane : lane; part <= parts; part += 32) {
    params.schedule[2 * part] = params.batch_size;
    params.schedule[2 * part + 1] = 0;
  }
}

#ifndef __CUDACC_RTC__

inline cudaError_t launch_mqa_schedule(const MqaScheduleParams& params, bool enable_pdl,
                                       cudaStream_t stream) {
  return launch_kernel(mqa_schedule_kernel, dim3(1), dim3(32), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
