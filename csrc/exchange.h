// The launcher that exchange.cu compiles for one configuration and exchange_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/comm/exchange_params.h>

namespace flashinfer {

cudaError_t exchange(const ExchangeParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
