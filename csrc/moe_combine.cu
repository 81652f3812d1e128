#include "moe_combine.h"

#include <flashinfer/moe/combine.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t moe_combine(const MoeCombineParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_moe_combine<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_DTYPE_OUT>(
      params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
