// The launcher that sigmoid_gate.cu compiles for one configuration and sigmoid_gate_jit_binding.cc
// calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/norm/sigmoid_gate_params.h>

namespace flashinfer {

cudaError_t sigmoid_gate(const SigmoidGateParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
