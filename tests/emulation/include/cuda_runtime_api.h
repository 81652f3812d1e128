// In place of the CUDA toolkit's header: one device of the architecture EMULATION_ARCH.
#pragma once

#include <vector_types.h>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidDevice = 101 };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
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

// Shared memory that a CTA may have: 227 KiB on 9.0, 163 on 8.0, 99 on 8.6. The carveout is a hint.
template <typename Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute attribute, int bytes) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  constexpr int kLimit = EMULATION_ARCH >= 900 ? 227 : EMULATION_ARCH == 800 ? 163 : 99;
  return bytes <= kLimit << 10 ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Kernel>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, Kernel*, int, size_t) {
  *ctas = 2;
  return cudaSuccess;
}
