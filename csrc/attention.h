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
#else
using ConfiguredVariantParams = VariantParams;
#endif

// One launch for the plan's items and, if any tile was cut, one that merges.
cudaError_t attention(const AttentionParams<ConfiguredVariantParams>& params, bool enable_pdl,
                      cudaStream_t stream);

// How many CTAs of the attention kernel an SM of the current device takes.
cudaError_t attention_ctas_per_sm(int* ctas);

}  // namespace flashinfer
