// The launcher that gemm_sm90.cu compiles for one configuration and gemm_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/gemm/gemm_params.h>

namespace flashinfer {

cudaError_t gemm(const GemmParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
