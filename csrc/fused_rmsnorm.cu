#include "fused_rmsnorm.h"

#include <flashinfer/norm/fused_rmsnorm.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t fused_rmsnorm(const FusedRmsnormParams& params, const DeviceInfo& device,
                          bool enable_pdl, cudaStream_t stream) {
  using Traits = FusedRmsnormTraits<dtype::FLASHINFER_CFG_DTYPE, norm_output::FLASHINFER_CFG_OUTPUT,
                                    FLASHINFER_CFG_ADD_RESIDUAL, FLASHINFER_CFG_SILU>;
  return launch_fused_rmsnorm<Traits>(params, device, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
