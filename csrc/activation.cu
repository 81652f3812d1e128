#include "activation.h"

#include <flashinfer/activation/activation.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t act_and_mul(const ActAndMulParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_act_and_mul<dtype::FLASHINFER_CFG_DTYPE, act::FLASHINFER_CFG_ACTIVATION>(
      params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
