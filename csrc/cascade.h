// The launcher that cascade.cu compiles for one configuration and cascade_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/cascade/cascade_params.h>

namespace flashinfer {

// `vectorizable`: head_dim and every row of v are whole, aligned 16-byte vectors.
cudaError_t merge_states(const MergeStatesParams& params, bool vectorizable, bool enable_pdl,
                         cudaStream_t stream);

}  // namespace flashinfer
