#include <flashinfer/sampling/draw/speculative.cuh>

#include "speculative.h"

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t chain_speculative(const SpeculativeParams& params, int device, int num_sms,
                              bool enable_pdl, cudaStream_t stream) {
  return launch_chain_speculative(params, device, num_sms, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
