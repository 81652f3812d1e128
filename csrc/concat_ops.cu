#include "concat_ops.h"

#include <flashinfer/concat/concat.cuh>

namespace flashinfer {

cudaError_t concat_mla_k(const ConcatMlaKParams& params, uint32_t unit_bytes, bool enable_pdl,
                         cudaStream_t stream) {
  return launch_concat_mla_k(params, unit_bytes, enable_pdl, stream);
}

}  // namespace flashinfer
