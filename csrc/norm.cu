#include <flashinfer/norm/norm.cuh>

#include "norm.h"

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t norm(const NormParams& params, bool vectorizable, const DeviceInfo& device,
                 bool enable_pdl, cudaStream_t stream) {
  using Traits = NormTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_OUT_DTYPE,
                            FLASHINFER_CFG_SUBTRACT_MEAN, FLASHINFER_CFG_ADD_RESIDUAL>;
  const NormSchedule schedule = choose_norm_schedule<Traits>(
      params.num_rows, params.hidden_size, vectorizable, device.num_sms, device.has_clusters());
  return launch_norm<Traits>(params, schedule, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
