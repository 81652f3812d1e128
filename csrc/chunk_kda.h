// The launcher that chunk_kda.cu compiles for one configuration and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/linear_attention/chunk_delta_rule_params.h>

namespace flashinfer {

// `schedule`: see launch_chunk_stages; 0: by the number of heads.
cudaError_t chunk_kda(const ChunkDeltaRuleParams& params, int num_sms, int schedule,
                      bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
