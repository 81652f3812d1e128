// The launcher that global_timer.cu compiles and its binding calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashinfer {

// Writes the GPU's clock in nanoseconds when the work before it has ended.
cudaError_t global_timer(uint64_t* nanoseconds, cudaStream_t stream);

}  // namespace flashinfer
