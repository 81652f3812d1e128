#include <flashinfer/comm/expert_dispatch.cuh>

#include "expert_dispatch.h"

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t expert_dispatch(const ExpertDispatchParams& params, bool enable_pdl,
                            cudaStream_t stream) {
  return launch_expert_dispatch<FLASHINFER_CFG_WORLD_SIZE>(params, enable_pdl, stream);
}

cudaError_t expert_sanitize(const ExpertSanitizeParams& params, bool enable_pdl,
                            cudaStream_t stream) {
  return launch_expert_sanitize<FLASHINFER_CFG_WORLD_SIZE>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
