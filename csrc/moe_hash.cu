#include "moe_hash.h"

#include <flashinfer/moe/hash.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t moe_hash(const MoeHashParams& params, bool enable_pdl, cudaStream_t stream) {
  using int32 = int32_t;
  using int64 = int64_t;
  return launch_moe_hash<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_IDS, FLASHINFER_CFG_TABLE>(
      params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
