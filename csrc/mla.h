// The launcher that mla_sm90.cu or another file of kernels compiles and mla_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/mla/mla_params.h>

namespace flashinfer {

// Computes the items of the plan and, if `merges`, merges the tiles that were cut.
cudaError_t mla(const MlaParams& params, bool merges, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
