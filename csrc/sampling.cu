#include <flashinfer/sampling/sampling.cuh>

#include "sampling.h"

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t sampling(const SamplingParams& params, int device, int num_sms, bool enable_pdl,
                     cudaStream_t stream) {
  using Traits = SamplingTraits<dtype::FLASHINFER_CFG_DTYPE, dtype::FLASHINFER_CFG_OUT_DTYPE,
                                FLASHINFER_CFG_LOGITS, SamplingFilter::FLASHINFER_CFG_FILTER,
                                SamplingOutput::FLASHINFER_CFG_OUTPUT>;
  if constexpr (Traits::kFilter == SamplingFilter::kNone &&
                Traits::kOutput == SamplingOutput::kProbs) {
    return launch_softmax<Traits>(params, device, enable_pdl, stream);
  } else if constexpr (Traits::kFilter == SamplingFilter::kTopP && !Traits::kLogits &&
                       Traits::kOutput == SamplingOutput::kToken) {
    return launch_nucleus_sampling<Traits>(params, device, enable_pdl, stream);
  } else if constexpr (samples_by_stream(Traits::kFilter, Traits::kOutput, Traits::kLogits)) {
    return launch_stream_sampling<Traits>(params, enable_pdl, stream);
  } else {
    return launch_sampling<Traits>(params, device, num_sms, enable_pdl, stream);
  }
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
