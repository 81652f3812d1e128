#include "mhc_post.h"

#include <flashinfer/mhc/mhc_post.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t mhc_post(const MhcPostParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_mhc_post<dtype::FLASHINFER_CFG_DTYPE>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
