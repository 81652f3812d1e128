#include "moe_token.h"

#include <flashinfer/moe/one_token.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t moe_token(const MoeTokenParams& params, uint32_t num_sms, bool enable_pdl,
                      cudaStream_t stream) {
  using int32 = int32_t;
  using int64 = int64_t;
  using Traits = MoeTokenTraits<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_INDEX>;
  return launch_moe_token<Traits>(params, num_sms, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
