// The launcher that gated_residual.cu compiles for one configuration and
// gated_residual_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/common/device_info.h>
#include <flashinfer/norm/gated_residual_params.h>

namespace flashinfer {

cudaError_t gated_residual(const GatedResidualParams& params, const DeviceInfo& device,
                           bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
