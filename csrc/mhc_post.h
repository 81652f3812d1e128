// The launcher that mhc_post.cu compiles for one configuration and mhc_post_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/mhc/mhc_post_params.h>

namespace flashinfer {

cudaError_t mhc_post(const MhcPostParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
