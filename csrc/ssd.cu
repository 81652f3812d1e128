#include "ssd.h"

#include <flashinfer/linear_attention/chunk_launch.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t ssd(const ChunkDeltaRuleParams& params, int num_sms, int schedule, bool enable_pdl,
                cudaStream_t stream) {
  using Traits = SsdTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_STATE_DTYPE,
                           dtype::FLASHINFER_CFG_DT_DTYPE, FLASHINFER_CFG_DSTATE>;
  return launch_chunk_delta_rule<Traits>(params, num_sms, schedule, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
