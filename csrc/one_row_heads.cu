#include "one_row_heads.h"

#include <flashinfer/gemm/one_row_heads.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t one_row_heads(const OneRowHeadsParams& params, uint32_t splits, bool enable_pdl,
                          cudaStream_t stream) {
  using Rope = RopeTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_OUT_DTYPE,
                          dtype::FLASHINFER_CFG_CACHE_DTYPE, FLASHINFER_CFG_INTERLEAVE, true, true>;
  return launch_one_row_heads<Rope, FLASHINFER_CFG_HEAD_DIM>(params, splits, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
