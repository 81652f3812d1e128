#include "sigmoid_gate.h"

#include <flashinfer/norm/sigmoid_gate.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t sigmoid_gate(const SigmoidGateParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_sigmoid_gate<dtype::FLASHINFER_CFG_DTYPE>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
