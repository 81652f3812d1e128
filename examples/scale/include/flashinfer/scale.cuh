#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flashinfer {

// output = input * factor, one element per thread.
template <typename T>
__global__ void ScaleKernel(const T* input, T* output, T factor, int64_t n) {
  const int64_t idx = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (idx < n) output[idx] = input[idx] * factor;
}

template <typename T>
cudaError_t ScaleLauncher(const T* input, T* output, T factor, int64_t n,
                          cudaStream_t stream = nullptr) {
  if (n == 0) return cudaSuccess;  // an empty grid is an error
  const int threads = 256;
  const int64_t blocks = (n + threads - 1) / threads;
  ScaleKernel<T><<<blocks, threads, 0, stream>>>(input, output, factor, n);
  return cudaGetLastError();
}

}  // namespace flashinfer
