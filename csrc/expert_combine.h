// The launcher that expert_combine.cu compiles for one configuration and
// expert_combine_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/comm/expert_exchange_params.h>

namespace flashinfer {

cudaError_t expert_combine(const ExpertCombineParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
