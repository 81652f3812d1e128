// The step between a product and its result: one value from one sum, or from a gate and a value.
#pragma once

#include <flashinfer/common/exp2.cuh>
#include <flashinfer/gemm/gemm_params.h>

namespace flashinfer {

// Constants of a gated activation; each group may have its own.
struct GemmGate {
  float alpha, beta, limit;
};

// The constants of `group`; Params has gate_alpha, gate_alphas, ... as gemm_params.h says.
template <typename Params>
__device__ __forceinline__ GemmGate gemm_gate(const Params& params, uint32_t group) {
  GemmGate gate = {params.gate_alpha, params.gate_beta, params.gate_limit};
  if (params.gate_alphas != nullptr) gate.alpha = __ldg(params.gate_alphas + group);
  if (params.gate_betas != nullptr) gate.beta = __ldg(params.gate_betas + group);
  if (params.gate_limits != nullptr) gate.limit = __ldg(params.gate_limits + group);
  return gate;
}

// `first` and `second` come from the halves of B's rows. For an 8-bit result exponential and
// quotient take a third of the instructions.
template <GemmActivation kActivation, bool kFor8Bits = false>
__device__ __forceinline__ float activate_pair(const GemmGate& constants, float first,
                                               float second) {
  float gate = kActivation == GemmActivation::swiglu ? first : second;
  float value = kActivation == GemmActivation::swiglu ? second : first;
  if constexpr (kActivation == GemmActivation::geglu_gate_last) {
    return 0.5f * gate * (1.f + erff(gate * 0.70710678f)) * value;
  }
  gate = fminf(gate, constants.limit);
  value = fminf(fmaxf(value, -constants.limit), constants.limit);
  const float sigmoid =
      kFor8Bits ? math::ptx_rcp(1.f + math::ptx_exp2(gate * (constants.alpha * -math::log2e)))
                : 1.f / (1.f + __expf(-constants.alpha * gate));
  return gate * sigmoid * (value + constants.beta);
}

__device__ __forceinline__ float squared_relu(float x) {
  const float positive = fmaxf(x, 0.f);
  return positive * positive;
}

}  // namespace flashinfer
