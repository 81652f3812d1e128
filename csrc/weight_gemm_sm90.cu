#include "weight_gemm.h"

#include <flashinfer/gemm/sm90/weight_launch.cuh>

namespace flashinfer {

// Not in an unnamed namespace: NVRTC finds a kernel by the names of its template arguments.
struct Config {
  using A = dtype::FLASHINFER_CFG_DTYPE_A;
  using D = dtype::FLASHINFER_CFG_DTYPE_OUT;
  // Powers of two come as bytes.
  using Scale = dtype::FLASHINFER_CFG_DTYPE_SCALE;
  static constexpr WeightFormat kFormat = WeightFormat::FLASHINFER_CFG_WEIGHTS;
  static constexpr int kGroup = FLASHINFER_CFG_GROUP_SIZE;
  static constexpr int kTokens = FLASHINFER_CFG_TOKENS;
  static constexpr int kWarps = FLASHINFER_CFG_WARPS;
  static constexpr int kSplits = FLASHINFER_CFG_SPLITS;
  static constexpr GemmActivation kActivation = GemmActivation::FLASHINFER_CFG_ACTIVATION;
};

#ifndef __CUDACC_RTC__

cudaError_t weight_gemm(const WeightGemmParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_weight_stream<WeightStreamTile<Config>>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
