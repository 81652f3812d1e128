#include "group_quant.h"

#include <flashinfer/quantization/group_quant.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t group_quant(const GroupQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  using Traits = GroupQuantTraits<dtype::FLASHINFER_CFG_DTYPE, code::FLASHINFER_CFG_CODE,
                                  scale::FLASHINFER_CFG_SCALE, layout::FLASHINFER_CFG_LAYOUT,
                                  FLASHINFER_CFG_GROUP_SIZE, FLASHINFER_CFG_SILU_AND_MUL>;
  return launch_group_quant<Traits>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
