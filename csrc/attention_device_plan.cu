#include "attention_device_plan.h"

#include <flashinfer/attention/device_plan.cuh>

namespace flashinfer {

cudaError_t device_plan(const DevicePlanParams& params, cudaStream_t stream) {
  return launch_device_plan(params, stream);
}

}  // namespace flashinfer
