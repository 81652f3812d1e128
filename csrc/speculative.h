// The launcher that speculative.cu compiles and speculative_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/sampling/speculative_params.h>

namespace flashinfer {

// `device` is the current one.
cudaError_t chain_speculative(const SpeculativeParams& params, int device, int num_sms,
                              bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
