// The launcher that quantized_all_reduce.cu compiles for one configuration and
// quantized_all_reduce_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/comm/quantized_all_reduce_params.h>

namespace flashinfer {

cudaError_t quantized_all_reduce(const QuantizedAllReduceParams& params, bool enable_pdl,
                                 cudaStream_t stream);

}  // namespace flashinfer
