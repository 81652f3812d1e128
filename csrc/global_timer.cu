#include "global_timer.h"

#include <flashinfer/timing/global_timer.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t global_timer(uint64_t* nanoseconds, cudaStream_t stream) {
  return launch_global_timer({nanoseconds}, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
