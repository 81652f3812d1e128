// The launcher that sampling.cu compiles for one configuration and sampling_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/sampling/sampling_params.h>

namespace flashinfer {

// `device` is the current one.
cudaError_t sampling(const SamplingParams& params, int device, int num_sms, bool enable_pdl,
                     cudaStream_t stream);

}  // namespace flashinfer
