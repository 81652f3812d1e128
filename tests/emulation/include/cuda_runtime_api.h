// In place of the CUDA toolkit's header: one device of the architecture EMULATION_ARCH.
#pragma once

#include <vector_types.h>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidDevice = 101 };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = void*;

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const bool is_major = attribute == cudaDevAttrComputeCapabilityMajor;
  *value = is_major ? EMULATION_ARCH / 100 : EMULATION_ARCH / 10 % 10;
  return cudaSuccess;
}

template <typename Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

template <typename Kernel>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, Kernel*, int, size_t) {
  *ctas = 2;
  return cudaSuccess;
}
