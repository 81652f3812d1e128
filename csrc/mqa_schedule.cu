#include "mqa_schedule.h"

#include <flashinfer/indexer/schedule.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t mqa_schedule(const MqaScheduleParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_mqa_schedule(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
