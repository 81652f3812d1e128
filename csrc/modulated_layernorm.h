// The launcher that modulated_layernorm.cu compiles for one configuration and
// modulated_layernorm_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/common/device_info.h>
#include <flashinfer/norm/modulated_layernorm_params.h>

namespace flashinfer {

cudaError_t modulated_layernorm(const ModulatedLayernormParams& params, const DeviceInfo& device,
                                cudaStream_t stream);

}  // namespace flashinfer
