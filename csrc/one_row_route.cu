#include "one_row_route.h"

#include <flashinfer/gemm/one_row_route.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t one_row_route(const OneRowRouteParams& params, uint32_t splits, bool enable_pdl,
                          cudaStream_t stream) {
  return launch_one_row_route<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_COLUMNS>(
      params, splits, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
