#include "attention_mask_ranges.h"

#include <flashinfer/attention/mask_ranges.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t mask_ranges(const MaskRangesParams& params, cudaStream_t stream) {
  return launch_mask_ranges(params, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
