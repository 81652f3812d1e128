// The launcher that one_row_heads.cu compiles for one configuration and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/gemm/one_row_heads_params.h>

namespace flashinfer {

// `splits`: CTAs that divide k.
cudaError_t one_row_heads(const OneRowHeadsParams& params, uint32_t splits, bool enable_pdl,
                          cudaStream_t stream);

}  // namespace flashinfer
