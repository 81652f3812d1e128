#include <flashinfer/comm/quantized_all_reduce.cuh>

#include "quantized_all_reduce.h"

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t quantized_all_reduce(const QuantizedAllReduceParams& params, bool enable_pdl,
                                 cudaStream_t stream) {
  using Traits = QuantizedAllReduceTraits<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_WORLD_SIZE,
                                          FLASHINFER_CFG_GROUP_SIZE>;
  return launch_quantized_all_reduce<Traits>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
