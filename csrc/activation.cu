#include "activation.h"

#include <flashinfer/activation/activation.cuh>

namespace flashinfer {

cudaError_t act_and_mul(const ActAndMulParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_act_and_mul<dtype::FLASHINFER_CFG_DTYPE, act::FLASHINFER_CFG_ACTIVATION>(
      params, enable_pdl, stream);
}

}  // namespace flashinfer
