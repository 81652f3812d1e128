// The launcher that few_rows.cu compiles for one configuration and few_rows_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/gemm/few_rows_params.h>

namespace flashinfer {

cudaError_t few_rows(const FewRowsParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
