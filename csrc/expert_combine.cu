#include <flashinfer/comm/expert_combine.cuh>

#include "expert_combine.h"

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t expert_combine(const ExpertCombineParams& params, bool enable_pdl,
                           cudaStream_t stream) {
  using Traits =
      ExpertCombineTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_DTYPE_STORED,
                          dtype::FLASHINFER_CFG_DTYPE_OUT, FLASHINFER_CFG_WORLD_SIZE>;
  return launch_expert_combine<Traits>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
