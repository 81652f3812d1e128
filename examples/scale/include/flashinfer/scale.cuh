// output[i] = input[i] * factor, in the type of the elements. One element per thread.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flashinfer {

template <typename T>
__global__ void __launch_bounds__(256)
    scale_kernel(const T* input, T* output, T factor, int64_t num_elements) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < num_elements) output[i] = input[i] * factor;
}

template <typename T>
cudaError_t launch_scale(const T* input, T* output, T factor, int64_t num_elements,
                         cudaStream_t stream) {
  if (num_elements == 0) return cudaSuccess;  // an empty grid is an error
  constexpr int kThreads = 256;
  const int64_t blocks = (num_elements + kThreads - 1) / kThreads;
  scale_kernel<T><<<blocks, kThreads, 0, stream>>>(input, output, factor, num_elements);
  return cudaGetLastError();
}

}  // namespace flashinfer
