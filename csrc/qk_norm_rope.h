// The launcher that qk_norm_rope.cu compiles for one configuration and qk_norm_rope_jit_binding.cc
// calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/rope/qk_norm_rope_params.h>

namespace flashinfer {

// `vectorizable`: as for launch_qk_norm_rope.
cudaError_t qk_norm_rope(const QkNormRopeParams& params, bool vectorizable, int num_sms,
                         bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
