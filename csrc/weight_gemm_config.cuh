// The configuration of a product with packed weights, as its kernels take it.
#pragma once

#include <flashinfer/gemm/activation.cuh>
#include <flashinfer/gemm/weight_codes.cuh>

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
  static constexpr int kColumns = FLASHINFER_CFG_COLUMNS;
  static constexpr GemmActivation kActivation = GemmActivation::FLASHINFER_CFG_ACTIVATION;
};

}  // namespace flashinfer
