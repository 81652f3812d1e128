#include "modulated_layernorm.h"

#include <flashinfer/norm/modulated_layernorm.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t modulated_layernorm(const ModulatedLayernormParams& params, const DeviceInfo& device,
                                cudaStream_t stream) {
  return launch_modulated_layernorm<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_GATE,
                                    FLASHINFER_CFG_AFFINE>(params, device, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
