// The launcher that weight_gemm.cu compiles for one configuration and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/gemm/weight_gemm_params.h>

namespace flashinfer {

cudaError_t weight_gemm(const WeightGemmParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
