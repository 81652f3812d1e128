// The launcher that attention_device_plan.cu compiles and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/attention/device_plan_params.h>

namespace flashinfer {

cudaError_t device_plan(const DevicePlanParams& params, cudaStream_t stream);

}  // namespace flashinfer
