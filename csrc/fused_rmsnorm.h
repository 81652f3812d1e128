// The launcher that fused_rmsnorm.cu compiles for one configuration and
// fused_rmsnorm_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/common/device_info.h>
#include <flashinfer/norm/fused_rmsnorm_params.h>

namespace flashinfer {

cudaError_t fused_rmsnorm(const FusedRmsnormParams& params, const DeviceInfo& device,
                          bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
