#include "gated_residual.h"

#include <flashinfer/norm/gated_residual.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t gated_residual(const GatedResidualParams& params, const DeviceInfo& device,
                           bool enable_pdl, cudaStream_t stream) {
  return launch_gated_residual<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_NEXT>(
      params, device, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
