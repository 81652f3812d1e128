// The launcher that replayssm_materialize.cu compiles for one configuration and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/linear_attention/state_replay_params.h>

namespace flashinfer {

cudaError_t replayssm_materialize(const MaterializeStateParams& params, bool enable_pdl,
                                  cudaStream_t stream);

}  // namespace flashinfer
