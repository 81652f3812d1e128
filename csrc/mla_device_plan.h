// The launcher that mla_device_plan.cu compiles and mla_device_plan_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/mla/plan_params.h>

namespace flashinfer {

// The most units that a plan can have.
int64_t mla_device_plan_most_units();

cudaError_t mla_device_plan(const MlaPlanParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
