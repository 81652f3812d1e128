// The launchers that expert_dispatch.cu compiles and expert_dispatch_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/comm/expert_exchange_params.h>

namespace flashinfer {

cudaError_t expert_dispatch(const ExpertDispatchParams& params, bool enable_pdl,
                            cudaStream_t stream);
cudaError_t expert_sanitize(const ExpertSanitizeParams& params, bool enable_pdl,
                            cudaStream_t stream);

}  // namespace flashinfer
