#include "kv_float4.h"

#include <flashinfer/quantization/kv_float4.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t kv_float4_append(const Float4AppendParams& params, bool enable_pdl,
                             cudaStream_t stream) {
  return launch_kv_float4_append<dtype::FLASHINFER_CFG_DTYPE>(params, enable_pdl, stream);
}

cudaError_t kv_float4_gather(const Float4GatherParams& params, bool enable_pdl,
                             cudaStream_t stream) {
  return launch_kv_float4_gather<dtype::FLASHINFER_CFG_DTYPE>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
