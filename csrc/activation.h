// The launcher that activation.cu compiles for one configuration and activation_jit_binding.cc
// calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/activation/activation_params.h>

namespace flashinfer {

cudaError_t act_and_mul(const ActAndMulParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
