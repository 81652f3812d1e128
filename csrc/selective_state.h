// The launcher that selective_state.cu compiles for one configuration and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/linear_attention/selective_state_params.h>

namespace flashinfer {

// `schedule`: 1: the kernel of one step where it can; else see launch_selective_state. 0: by the
// call.
cudaError_t selective_state(const SelectiveStateParams& params, int num_sms, int schedule,
                            bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
