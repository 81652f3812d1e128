// Stands for users' variants in host parts: a kernel without hooks, whose machine code is dropped.
#pragma once

#include <flashinfer/attention/variant.cuh>

#include "attention_variant_params.h"

namespace flashinfer {

struct UserVariant : AttentionVariantBase {
  template <typename Params>
  __device__ __host__ UserVariant(const Params&, uint32_t, uint8_t*) {}
};

}  // namespace flashinfer
