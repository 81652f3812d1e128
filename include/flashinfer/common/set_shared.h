// Says how much shared memory a kernel has, to CTAs and to SMs. Plain C++.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashinfer {

// Lets an SM set a share of its memory aside as shared memory. An SM takes CTAs of another kernel,
// before it is empty, only into memory that it has set aside already: so kernels of a chain that
// begin early ask for the same.
inline cudaError_t set_shared_percent(const void* kernel, int percent) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent);
}

// Lets a CTA have `bytes`, and an SM set memory aside for `ctas` of them: 64 KB at least, as small
// kernels of a chain do. For Hopper, whose SMs have 228 KB.
inline cudaError_t set_shared(const void* kernel, uint32_t bytes, uint32_t ctas) {
  constexpr uint32_t kMost = 228 << 10, kOfCta = 3 << 10;  // static ones, and the system's
  constexpr int kLeastPercent = 28;
  const uint32_t percent = (ctas * (bytes + kOfCta) * 100 + kMost - 1) / kMost;
  const int share = percent < kLeastPercent ? kLeastPercent : percent > 100 ? 100 : percent;
  const cudaError_t error = set_shared_percent(kernel, share);
  if (error != cudaSuccess) return error;
  // The same for all sizes: threads that launch at a time must not lower each other's limit.
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kMost - kOfCta));
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
