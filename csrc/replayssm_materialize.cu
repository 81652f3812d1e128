#include "replayssm_materialize.h"

#include <flashinfer/linear_attention/state_replay.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t replayssm_materialize(const MaterializeStateParams& params, bool enable_pdl,
                                  cudaStream_t stream) {
  using Traits =
      SelectiveStateTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_STATE_DTYPE,
                           dtype::float32, dtype::FLASHINFER_CFG_A_DTYPE, dtype::float32,
                           FLASHINFER_CFG_DSTATE, true, FLASHINFER_CFG_STOCHASTIC>;
  return launch_state_replay<Traits>(params, params.num_layers, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
