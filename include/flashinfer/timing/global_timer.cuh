// The GPU's clock as a kernel: the time at which the work before it on a stream has ended.
#pragma once

#include <cstdint>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/ptx/clock.cuh>

namespace flashinfer {

struct GlobalTimerParams {
  uint64_t* nanoseconds;  // [1]
};

// One thread.
__global__ void global_timer_kernel(const __grid_constant__ GlobalTimerParams params) {
  *params.nanoseconds = ptx::global_time_ns();
}

#ifndef __CUDACC_RTC__

inline cudaError_t launch_global_timer(const GlobalTimerParams& params, cudaStream_t stream) {
  return launch_kernel(global_timer_kernel, dim3(1), dim3(1), 0, stream, false, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
