// The launchers that mqa_logits.cu compiles for one configuration and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/indexer/mqa_logits_params.h>

namespace flashinfer {

cudaError_t mqa_logits(const MqaLogitsParams& params, int num_ctas, bool enable_pdl,
                       cudaStream_t stream);

}  // namespace flashinfer
