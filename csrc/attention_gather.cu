#include "attention_gather.h"

#include <flashinfer/attention/gather.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t gather(const GatherParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_gather(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
