// The launcher that moe_map.cu compiles and moe_map_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/moe/moe_params.h>

namespace flashinfer {

cudaError_t moe_map(const MoeMapParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
