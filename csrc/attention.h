// The launcher that attention.cu compiles and attention_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/attention/attention_params.h>

#if FLASHINFER_CFG_CUSTOM_VARIANT
#include "attention_variant_params.h"  // UserVariantParams, rendered from the caller's declaration
#endif

namespace flashinfer {

#if FLASHINFER_CFG_CUSTOM_VARIANT
using ConfiguredVariantParams = UserVariantParams;
#elif FLASHINFER_CFG_LOGITS_SOFT_CAP
using ConfiguredVariantParams = CappedVariantParams;
#else
using ConfiguredVariantParams = VariantParams;
#endif

#if FLASHINFER_CFG_TILE_Q_SECOND && FLASHINFER_CFG_CUSTOM_VARIANT
using ShapedParams = TwoShapeAttentionParams<ConfiguredVariantParams, ConfiguredVariantParams>;
#elif FLASHINFER_CFG_TILE_Q_SECOND && FLASHINFER_CFG_LOGITS_SOFT_CAP_SECOND
using ShapedParams = TwoShapeAttentionParams<ConfiguredVariantParams, CappedVariantParams>;
#elif FLASHINFER_CFG_TILE_Q_SECOND
using ShapedParams = TwoShapeAttentionParams<ConfiguredVariantParams, VariantParams>;
#else
using ShapedParams = AttentionParams<ConfiguredVariantParams>;
#endif

#if FLASHINFER_CFG_DEVICE_LENGTHS
using ConfiguredParams = LengthsAttentionParams<ConfiguredVariantParams>;
#elif FLASHINFER_CFG_PROFILED
using ConfiguredParams = ProfiledAttentionParams<ShapedParams>;
#else
using ConfiguredParams = ShapedParams;
#endif

// Launches the plan's items and, if any tile was split, the merge.
cudaError_t attention(const ConfiguredParams& params, bool enable_pdl, cudaStream_t stream);

// Number of CTAs of the attention kernel that fit on an SM of the current device.
cudaError_t attention_ctas_per_sm(int* ctas);

}  // namespace flashinfer
