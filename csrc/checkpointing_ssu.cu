#include "checkpointing_ssu.h"

#include <flashinfer/linear_attention/state_replay.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t checkpointing_ssu(const CheckpointingStateParams& params, bool enable_pdl,
                              cudaStream_t stream) {
  using Traits =
      SelectiveStateTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_STATE_DTYPE,
                           dtype::FLASHINFER_CFG_DT_DTYPE, dtype::FLASHINFER_CFG_A_DTYPE,
                           dtype::FLASHINFER_CFG_WEIGHT_DTYPE, FLASHINFER_CFG_DSTATE, true,
                           FLASHINFER_CFG_STOCHASTIC>;
  return launch_state_replay<Traits>(params, 1, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
