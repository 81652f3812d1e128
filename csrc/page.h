// The launchers that page.cu compiles and page_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/page/page_params.h>

namespace flashinfer {

// `unit_bytes`: 16, 4, 2 or 1; divides every size, stride and address of the operands.
cudaError_t append(const AppendParams& params, uint32_t unit_bytes, bool enable_pdl,
                   cudaStream_t stream);
cudaError_t batch_indices(const BatchIndicesParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t seq_lens(const SeqLensParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
