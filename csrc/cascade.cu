#include "cascade.h"

#include <flashinfer/cascade/cascade.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t merge_states(const MergeStatesParams& params, bool vectorizable, bool enable_pdl,
                         cudaStream_t stream) {
  return launch_merge_states<dtype::FLASHINFER_CFG_DTYPE, FLASHINFER_CFG_PAIR>(params, vectorizable,
                                                                               enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
