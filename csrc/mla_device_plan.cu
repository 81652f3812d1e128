#include "mla_device_plan.h"

#include <flashinfer/mla/plan.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

int64_t mla_device_plan_most_units() { return MlaDevicePlanner::kMaxUnits; }

cudaError_t mla_device_plan(const MlaPlanParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_mla_plan(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
