#include "packbits.h"

#include <flashinfer/quantization/packbits.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t packbits(const PackBitsParams& params, bool enable_pdl, cudaStream_t stream) {
  using int32 = int32_t;
  using int64 = int64_t;
  using none = void;
  return launch_packbits<FLASHINFER_CFG_INDEX>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
