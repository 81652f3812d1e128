// The launcher that packbits.cu compiles and packbits_jit_binding.cc calls.
#pragma once

#include <cuda_runtime_api.h>

#include <flashinfer/quantization/packbits_params.h>

namespace flashinfer {

cudaError_t packbits(const PackBitsParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace flashinfer
