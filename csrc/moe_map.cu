#include "moe_map.h"

#include <flashinfer/moe/map.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t moe_map(const MoeMapParams& params, bool enable_pdl, cudaStream_t stream) {
  using int32 = int32_t;
  using int64 = int64_t;
  return launch_moe_map<FLASHINFER_CFG_INDEX>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
