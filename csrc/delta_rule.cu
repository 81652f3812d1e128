#include "delta_rule.h"

#include <flashinfer/linear_attention/delta_rule_key_major.cuh>
#include <flashinfer/linear_attention/delta_rule_step.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t delta_rule(const DeltaRuleParams& params, int num_sms, int schedule, bool enable_pdl,
                       cudaStream_t stream) {
  using Traits = DeltaRuleTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_STATE_DTYPE,
                                 dtype::FLASHINFER_CFG_GATE_DTYPE, dtype::FLASHINFER_CFG_BETA_DTYPE,
                                 dtype::FLASHINFER_CFG_BIAS_DTYPE, FLASHINFER_CFG_HEAD_DIM_K,
                                 FLASHINFER_CFG_CHANNEL_GATE>;
  if constexpr (FLASHINFER_CFG_KEY_MAJOR) {
    return launch_delta_rule_key_major<Traits>(params, enable_pdl, stream);
  }
  if constexpr (!FLASHINFER_CFG_CHANNEL_GATE) {
    if (takes_delta_rule_step<Traits>(params, num_sms, schedule)) {
      return launch_delta_rule_step<Traits>(params, enable_pdl, stream);
    }
  }
  return launch_delta_rule<Traits>(params, num_sms, schedule, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
