#include "mhc_pre.h"

#include <flashinfer/mhc/mhc_pre.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t mhc_pre(const MhcPreParams& params, const DeviceInfo& device, bool enable_pdl,
                    cudaStream_t stream) {
  return launch_mhc_pre<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_PRENORM>(params, device,
                                                                             enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
