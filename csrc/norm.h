// The launcher that norm.cu compiles for one configuration and norm_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/common/device_info.h>
#include <flashinfer/norm/norm_params.h>

namespace flashinfer {

// `vectorizable`: hidden_size and the start of every row are multiples of 16 bytes (of 8 output
// bytes for 8-bit outputs).
cudaError_t norm(const NormParams& params, bool vectorizable, const DeviceInfo& device,
                 bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
