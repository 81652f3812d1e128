#include "chunk_kda.h"

#include <flashinfer/linear_attention/chunk_launch.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t chunk_kda(const ChunkDeltaRuleParams& params, int num_sms, int schedule,
                      bool enable_pdl, cudaStream_t stream) {
  using Traits = ChunkKdaTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_STATE_DTYPE,
                                dtype::FLASHINFER_CFG_GATE_DTYPE, dtype::FLASHINFER_CFG_BETA_DTYPE,
                                dtype::FLASHINFER_CFG_BIAS_DTYPE, FLASHINFER_CFG_HEAD_DIM_K>;
  return launch_chunk_kda<Traits>(params, num_sms, schedule, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
