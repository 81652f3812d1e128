// The launcher that moe_token.cu compiles and moe_token_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/moe/moe_params.h>

namespace flashinfer {

cudaError_t moe_token(const MoeTokenParams& params, uint32_t num_sms, bool enable_pdl,
                      cudaStream_t stream);

}  // namespace flashinfer
