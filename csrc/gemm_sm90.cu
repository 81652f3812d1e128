#include "gemm.h"

#include <flashinfer/gemm/sm90/launch.cuh>

namespace flashinfer {

// Not in an unnamed namespace: NVRTC finds a kernel by the names of its template arguments.
struct Config {
  using A = dtype::FLASHINFER_CFG_DTYPE_A;
  using B = dtype::FLASHINFER_CFG_DTYPE_B;
  using D = dtype::FLASHINFER_CFG_DTYPE_OUT;
  static constexpr GemmScale kScale = GemmScale::FLASHINFER_CFG_SCALE;
  static constexpr GemmGroups kGroups = GemmGroups::FLASHINFER_CFG_GROUPS;
  static constexpr int kTileRows = FLASHINFER_CFG_TILE_ROWS;
  static constexpr int kTileColumns = FLASHINFER_CFG_TILE_COLUMNS;
  static constexpr int kConsumers = FLASHINFER_CFG_CONSUMERS;
  static constexpr bool kSwap = FLASHINFER_CFG_SWAP;
  static constexpr int kClusterRows = FLASHINFER_CFG_CLUSTER_ROWS;
  static constexpr int kClusterColumns = FLASHINFER_CFG_CLUSTER_COLUMNS;
  static constexpr int kSplits = FLASHINFER_CFG_SPLITS;
  static constexpr GemmActivation kActivation = GemmActivation::FLASHINFER_CFG_ACTIVATION;
  static constexpr bool kGathers = FLASHINFER_CFG_GATHERS;
  static constexpr int kMaxStages = FLASHINFER_CFG_MAX_STAGES;
};

#ifndef __CUDACC_RTC__

cudaError_t gemm(const GemmParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_gemm_sm90<GemmTile<Config>>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
