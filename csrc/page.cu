#include "page.h"

#include <flashinfer/page/page.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t append(const AppendParams& params, uint32_t unit_bytes, bool enable_pdl,
                   cudaStream_t stream) {
  return launch_append(params, unit_bytes, enable_pdl, stream);
}

cudaError_t batch_indices(const BatchIndicesParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_batch_indices(params, enable_pdl, stream);
}

cudaError_t seq_lens(const SeqLensParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_seq_lens(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
