// The launcher that moe_hash.cu compiles and moe_hash_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/moe/moe_params.h>

namespace flashinfer {

cudaError_t moe_hash(const MoeHashParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
