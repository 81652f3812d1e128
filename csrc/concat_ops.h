// The launcher that concat_ops.cu compiles and concat_ops_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/concat/concat_params.h>

namespace flashinfer {

// `unit_bytes`: 16, 4, 2 or 1; divides every size, stride and address.
cudaError_t concat_mla_k(const ConcatMlaKParams& params, uint32_t unit_bytes, bool enable_pdl,
                         cudaStream_t stream);

}  // namespace flashinfer
