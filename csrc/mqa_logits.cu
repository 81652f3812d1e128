#include "mqa_logits.h"

#include <flashinfer/indexer/sm90/mqa_logits.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t mqa_logits(const MqaLogitsParams& params, int num_ctas, bool enable_pdl,
                       cudaStream_t stream) {
  using Tile = MqaTile<dtype::FLASHINFER_CFG_DTYPE_OUT, FLASHINFER_CFG_HEADS,
                       FLASHINFER_CFG_QUERIES, FLASHINFER_CFG_PAGED>;
  return launch_mqa_logits<Tile>(params, num_ctas, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
