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
template <bool, PosEncoding>
using VariantWith = UserVariant;
#else
template <bool kSoftCap, PosEncoding kEncoding>
using VariantWith = DefaultAttention<kSoftCap, kEncoding == PosEncoding::alibi,
                                     FLASHINFER_CFG_SINKS, FLASHINFER_CFG_HEAD_SCALES>;
#endif
using ConfiguredVariant = VariantWith<FLASHINFER_CFG_LOGITS_SOFT_CAP, kPosEncoding>;

}  // namespace flashinfer
