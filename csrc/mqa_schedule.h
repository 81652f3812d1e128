// The launcher that mqa_schedule.cu compiles and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/indexer/mqa_logits_params.h>

namespace flashinfer {

cudaError_t mqa_schedule(const MqaScheduleParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
