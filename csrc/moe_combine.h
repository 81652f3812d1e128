// The launcher that moe_combine.cu compiles and moe_combine_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/moe/moe_params.h>

namespace flashinfer {

cudaError_t moe_combine(const MoeCombineParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
