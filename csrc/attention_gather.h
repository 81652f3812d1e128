// The launcher that attention_gather.cu compiles and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/attention/gather_params.h>

namespace flashinfer {

cudaError_t gather(const GatherParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
