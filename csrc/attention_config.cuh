// The compile-time configuration of a module, for both attention kernels.
#pragma once

#include <flashinfer/attention/variant.cuh>

#include "attention.h"

#if FLASHINFER_CFG_CUSTOM_VARIANT
#include "attention_variant.cuh"  // UserVariant
#endif

namespace flashinfer {

enum class PosEncoding { none, rope_llama, alibi };
inline constexpr PosEncoding kPosEncoding = PosEncoding::FLASHINFER_CFG_POS_ENCODING;

#if FLASHINFER_CFG_CUSTOM_VARIANT
using ConfiguredVariant = UserVariant;
#else
using ConfiguredVariant =
    DefaultAttention<FLASHINFER_CFG_LOGITS_SOFT_CAP, kPosEncoding == PosEncoding::alibi,
                     FLASHINFER_CFG_SINKS, FLASHINFER_CFG_HEAD_SCALES>;
#endif

}  // namespace flashinfer
