// The launcher that one_row.cu compiles for one configuration and one_row_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/gemm/one_row_params.h>

namespace flashinfer {

// `splits`: CTAs that divide k.
cudaError_t one_row(const OneRowParams& params, uint32_t splits, bool enable_pdl,
                    cudaStream_t stream);

}  // namespace flashinfer
