#include <flashinfer/sampling/draw/speculative.cuh>

#include "speculative.h"

namespace flashinfer {

cudaError_t chain_speculative(const SpeculativeParams& params, int device, int num_sms,
                              bool enable_pdl, cudaStream_t stream) {
  return launch_chain_speculative(params, device, num_sms, enable_pdl, stream);
}

}  // namespace flashinfer
