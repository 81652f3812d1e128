#include <flashinfer/attention/sm90/launch.cuh>

#include "attention_config.cuh"

namespace flashinfer {

static_assert(kPosEncoding != PosEncoding::rope_llama,
              "keys are multiplied as they come from memory");
static_assert(FLASHINFER_CFG_TILE_Q_SECOND == 0, "one shape of tiles");
static_assert(!ConfiguredVariant::kHasQueryTransform && !ConfiguredVariant::kHasKeyTransform,
              "queries and keys are multiplied as they come from memory");

// Not in an unnamed namespace: NVRTC finds a kernel by the names of its template arguments.
struct Traits {
  using Tile = HopperTile<dtype::FLASHINFER_CFG_DTYPE_Q, dtype::FLASHINFER_CFG_DTYPE_KV,
                          dtype::FLASHINFER_CFG_DTYPE_O, FLASHINFER_CFG_HEAD_DIM_QK,
                          FLASHINFER_CFG_HEAD_DIM_VO, FLASHINFER_CFG_TILE_Q / 64>;
  using Variant = ConfiguredVariant;
  static constexpr bool kUserVariant = FLASHINFER_CFG_CUSTOM_VARIANT;
  static constexpr int kKind = 0;
  static constexpr bool kPaged = FLASHINFER_CFG_PAGED;
  static constexpr MaskMode kMask = MaskMode::FLASHINFER_CFG_MASK_MODE;
  static constexpr bool kWindow = FLASHINFER_CFG_SLIDING_WINDOW;
};
static_assert(FLASHINFER_CFG_TILE_Q == Traits::Tile::kTileQ, "64 rows per warpgroup");

#ifndef __CUDACC_RTC__

cudaError_t attention(const ConfiguredParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_hopper_attention<Traits>(params, enable_pdl, stream);
}

cudaError_t attention_ctas_per_sm(int* ctas) {
  int num_sms = 0;
  *ctas = 1;
  return prepare_hopper_attention<Traits, ConfiguredParams>(&num_sms);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
