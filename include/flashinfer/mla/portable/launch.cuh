// Host side of the portable MLA kernel.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/mla/portable/mla.cuh>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Shared memory of the kernel on a device, whose limit is raised once.
template <typename T, typename O, int kDimCkv, int kDimKpe, bool kProfiled>
inline cudaError_t prepare_mla_portable(int* shared_bytes) {
  return once_per_device(shared_bytes, [](int device, int* bytes) {
    int major = 0, minor = 0;
    cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (status != cudaSuccess) return status;
    constexpr int kLarge = max_shared_bytes(90), kMedium = max_shared_bytes(80);
    constexpr int kSmall = max_shared_bytes(86);
    const int limit = max_shared_bytes(10 * major + minor);
    *bytes = limit == kLarge    ? MlaPortableTile<T, O, kDimCkv, kDimKpe, kLarge>::kSharedBytes
             : limit == kMedium ? MlaPortableTile<T, O, kDimCkv, kDimKpe, kMedium>::kSharedBytes
                                : MlaPortableTile<T, O, kDimCkv, kDimKpe, kSmall>::kSharedBytes;
    return cudaFuncSetAttribute(mla_portable_kernel<T, O, kDimCkv, kDimKpe, kProfiled>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, *bytes);
  });
}

template <typename T, typename O, int kDimCkv, int kDimKpe, bool kProfiled>
inline cudaError_t launch_mla_portable(const MlaParams& params, bool enable_pdl,
                                       cudaStream_t stream) {
  int shared_bytes = 0;
  const cudaError_t status = prepare_mla_portable<T, O, kDimCkv, kDimKpe, kProfiled>(&shared_bytes);
  if (status != cudaSuccess) return status;
  return launch_kernel(mla_portable_kernel<T, O, kDimCkv, kDimKpe, kProfiled>,
                       dim3(params.num_ctas), dim3(256), shared_bytes, stream, enable_pdl, params);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
