// The launcher that mhc_pre.cu compiles for one configuration and mhc_pre_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/common/device_info.h>
#include <flashinfer/mhc/mhc_pre_params.h>

namespace flashinfer {

cudaError_t mhc_pre(const MhcPreParams& params, const DeviceInfo& device, bool enable_pdl,
                    cudaStream_t stream);

}  // namespace flashinfer
