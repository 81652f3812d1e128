#include <flashinfer/comm/exchange.cuh>

#include "exchange.h"

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t exchange(const ExchangeParams& params, bool enable_pdl, cudaStream_t stream) {
  using Traits =
      ExchangeTraits<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_WORLD_SIZE, FLASHINFER_CFG_ADDS>;
  return launch_exchange<Traits>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
