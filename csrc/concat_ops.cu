#include "concat_ops.h"

#include <flashinfer/concat/concat.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t concat_mla_k(const ConcatMlaKParams& params, uint32_t unit_bytes, bool enable_pdl,
                         cudaStream_t stream) {
  return launch_concat_mla_k(params, unit_bytes, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
