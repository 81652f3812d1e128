#include <flashinfer/attention/portable/launch.cuh>

#include "attention_config.cuh"

namespace flashinfer {
namespace {

constexpr bool kRotates = kPosEncoding == PosEncoding::rope_llama;

template <int kTileQ, bool kPaged, MaskMode kMask>
using Traits = AttentionTraits<
    TileTraits<dtype::FLASHINFER_CFG_DTYPE_Q, dtype::FLASHINFER_CFG_DTYPE_KV,
               dtype::FLASHINFER_CFG_DTYPE_O, FLASHINFER_CFG_HEAD_DIM_QK,
               FLASHINFER_CFG_HEAD_DIM_VO, kTileQ, kRotates || ConfiguredVariant::kHasKeyTransform>,
    ConfiguredVariant, kPaged, kMask, FLASHINFER_CFG_SLIDING_WINDOW, kRotates>;

using First =
    Traits<FLASHINFER_CFG_TILE_Q, FLASHINFER_CFG_PAGED, MaskMode::FLASHINFER_CFG_MASK_MODE>;
#if FLASHINFER_CFG_TILE_Q_SECOND
using Second =
    Traits<FLASHINFER_CFG_TILE_Q_SECOND, true, MaskMode::FLASHINFER_CFG_MASK_MODE_SECOND>;
#else
using Second = void;
#endif

}  // namespace

#ifndef __CUDACC_RTC__

cudaError_t attention(const ConfiguredParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_attention<First, Second>(params, enable_pdl, stream);
}

cudaError_t attention_ctas_per_sm(int* ctas) {
  return count_ctas_per_sm<First, Second, ConfiguredParams>(ctas);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
