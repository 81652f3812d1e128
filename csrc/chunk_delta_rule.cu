#include "chunk_delta_rule.h"

#include <flashinfer/linear_attention/chunk_launch.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t chunk_delta_rule(const ChunkDeltaRuleParams& params, int num_sms, int schedule,
                             bool enable_pdl, cudaStream_t stream) {
  using Traits = ChunkDeltaRuleTraits<dtype::FLASHINFER_CFG_DTYPE,
                                      dtype::FLASHINFER_CFG_STATE_DTYPE, FLASHINFER_CFG_HEAD_DIM_K>;
  return launch_chunk_delta_rule<Traits>(params, num_sms, schedule, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
