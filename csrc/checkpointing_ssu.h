// The launcher that checkpointing_ssu.cu compiles for one configuration and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/linear_attention/state_replay_params.h>

namespace flashinfer {

cudaError_t checkpointing_ssu(const CheckpointingStateParams& params, bool enable_pdl,
                              cudaStream_t stream);

}  // namespace flashinfer
