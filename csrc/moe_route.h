// The launcher that moe_route.cu compiles and moe_route_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/moe/moe_params.h>

namespace flashinfer {

cudaError_t moe_route(const MoeRouteParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
