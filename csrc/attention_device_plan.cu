#include "attention_device_plan.h"

#include <flashinfer/attention/device_plan.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t device_plan(const DevicePlanParams& params, cudaStream_t stream) {
  return launch_device_plan(params, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
