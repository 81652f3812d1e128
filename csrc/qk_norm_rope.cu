#include "qk_norm_rope.h"

#include <flashinfer/rope/qk_norm_rope.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t qk_norm_rope(const QkNormRopeParams& params, bool vectorizable, int num_sms,
                         bool enable_pdl, cudaStream_t stream) {
  using Traits = QkNormRopeTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_OUT_DTYPE,
                                  FLASHINFER_CFG_INTERLEAVE, FLASHINFER_CFG_NORM>;
  return launch_qk_norm_rope<Traits>(params, vectorizable, num_sms, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
