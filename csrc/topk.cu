#include <flashinfer/sampling/top_k/largest.cuh>
#include <flashinfer/sampling/top_k/stream.cuh>

#include "topk.h"

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t top_k(const TopKParams& params, int device, int num_sms, bool enable_pdl,
                  cudaStream_t stream) {
  using Traits = TopKTraits<dtype::FLASHINFER_CFG_DTYPE, TopKOutput::FLASHINFER_CFG_OUTPUT>;
  if constexpr (Traits::kOutput == TopKOutput::kValues) {
    if (params.k == 1) return launch_largest<Traits>(params, device, num_sms, enable_pdl, stream);
  }
  if (params.workspace) return launch_top_k_stream<Traits>(params, enable_pdl, stream);
  return launch_top_k<Traits>(params, device, num_sms, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
