#include <flashinfer/attention/portable/launch.cuh>

#include "attention_config.cuh"

namespace flashinfer {
namespace {

template <int kKind, int kTileQ, bool kPaged, MaskMode kMask, bool kWindow, PosEncoding kEncoding,
          typename Variant, bool kRotates = kEncoding == PosEncoding::rope_llama>
using Traits = AttentionTraits<
    TileTraits<dtype::FLASHINFER_CFG_DTYPE_Q, dtype::FLASHINFER_CFG_DTYPE_KV,
               dtype::FLASHINFER_CFG_DTYPE_O, FLASHINFER_CFG_HEAD_DIM_QK,
               FLASHINFER_CFG_HEAD_DIM_VO, kTileQ, kRotates || Variant::kHasKeyTransform>,
    Variant, kPaged, kMask, kWindow, kRotates, kKind>;

using First =
    Traits<0, FLASHINFER_CFG_TILE_Q, FLASHINFER_CFG_PAGED, MaskMode::FLASHINFER_CFG_MASK_MODE,
           FLASHINFER_CFG_SLIDING_WINDOW, kPosEncoding, ConfiguredVariant>;
#if FLASHINFER_CFG_TILE_Q_SECOND
constexpr PosEncoding kSecondEncoding = PosEncoding::FLASHINFER_CFG_POS_ENCODING_SECOND;
using Second =
    Traits<1, FLASHINFER_CFG_TILE_Q_SECOND, true, MaskMode::FLASHINFER_CFG_MASK_MODE_SECOND,
           FLASHINFER_CFG_SLIDING_WINDOW_SECOND, kSecondEncoding,
           VariantWith<FLASHINFER_CFG_LOGITS_SOFT_CAP_SECOND, kSecondEncoding>>;
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
