#include <flashinfer/comm/all_reduce.cuh>

#include "all_reduce.h"

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t all_reduce(const AllReduceParams& params, const AllReduceSchedule& schedule,
                       bool enable_pdl, cudaStream_t stream) {
  using Traits = AllReduceTraits<dtype::FLASHINFER_CFG_DTYPE, row_input::FLASHINFER_CFG_INPUT,
                                 row_output::FLASHINFER_CFG_OUTPUT, FLASHINFER_CFG_WORLD_SIZE>;
  return launch_all_reduce<Traits>(params, schedule, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
