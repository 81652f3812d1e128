#include "selective_state.h"

#include <flashinfer/linear_attention/selective_state_step.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t selective_state(const SelectiveStateParams& params, int num_sms, int schedule,
                            bool enable_pdl, cudaStream_t stream) {
  using Traits =
      SelectiveStateTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_STATE_DTYPE,
                           dtype::FLASHINFER_CFG_DT_DTYPE, dtype::FLASHINFER_CFG_A_DTYPE,
                           dtype::FLASHINFER_CFG_WEIGHT_DTYPE, FLASHINFER_CFG_DSTATE,
                           FLASHINFER_CFG_TIED, FLASHINFER_CFG_STOCHASTIC>;
  if constexpr (kHasSelectiveStep<Traits>) {
    if (takes_selective_state_step<Traits>(params, schedule)) {
      return launch_selective_state_step<Traits>(params, num_sms, enable_pdl, stream);
    }
  }
  return launch_selective_state<Traits>(params, num_sms, schedule, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
