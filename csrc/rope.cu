#include "rope.h"

#include <flashinfer/rope/rope.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t rope(const RopeCallParams& params, bool vectorizable, bool enable_pdl,
                 cudaStream_t stream) {
  using TCache =
      std::conditional_t<FLASHINFER_CFG_COMPUTED, void, dtype::FLASHINFER_CFG_CACHE_DTYPE>;
  using Traits =
      RopeTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_OUT_DTYPE, TCache,
                 FLASHINFER_CFG_INTERLEAVE, FLASHINFER_CFG_APPEND, FLASHINFER_CFG_KEEPS_ROWS>;
  return launch_rope<Traits>(params, vectorizable, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
