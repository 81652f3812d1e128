#include "one_row.h"

#include <flashinfer/gemm/one_row.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t one_row(const OneRowParams& params, uint32_t splits, bool enable_pdl,
                    cudaStream_t stream) {
  using Traits =
      OneRowTraits<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_COLUMNS, FLASHINFER_CFG_NORM>;
  return launch_one_row<Traits>(params, splits, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
