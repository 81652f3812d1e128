// The launchers that kv_float4.cu compiles and kv_float4_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/quantization/kv_float4_params.h>

namespace flashinfer {

cudaError_t kv_float4_append(const Float4AppendParams& params, bool enable_pdl,
                             cudaStream_t stream);
cudaError_t kv_float4_gather(const Float4GatherParams& params, bool enable_pdl,
                             cudaStream_t stream);

}  // namespace flashinfer
