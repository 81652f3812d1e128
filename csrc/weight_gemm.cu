#include "weight_gemm.h"
#include "weight_gemm_config.cuh"

#include <flashinfer/gemm/portable/launch.cuh>

namespace flashinfer {

#ifndef __CUDACC_RTC__

cudaError_t weight_gemm(const WeightGemmParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_weight_gemm<WeightGemmTile<Config>>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
