#include "moe_route.h"

#include <flashinfer/moe/route.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t moe_route(const MoeRouteParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_moe_route<dtype::FLASHINFER_CFG_DTYPE, MoeScore::FLASHINFER_CFG_SCORE,
                          FLASHINFER_CFG_EXPERTS_PER_LANE>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
