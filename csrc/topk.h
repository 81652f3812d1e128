// The launcher that topk.cu compiles for one configuration and topk_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/sampling/topk_params.h>

namespace flashinfer {

// `device` is the current one.
cudaError_t top_k(const TopKParams& params, int device, int num_sms, bool enable_pdl,
                  cudaStream_t stream);

}  // namespace flashinfer
