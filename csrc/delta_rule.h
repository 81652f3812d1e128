// The launcher that delta_rule.cu compiles for one configuration and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/linear_attention/delta_rule_params.h>

namespace flashinfer {

// `schedule`: 1: the kernel of one step where it can; else see launch_delta_rule. 0: by the size of
// the state.
cudaError_t delta_rule(const DeltaRuleParams& params, int num_sms, int schedule, bool enable_pdl,
                       cudaStream_t stream);

}  // namespace flashinfer
