// Host side of the portable attention kernel.
#pragma once

#include <flashinfer/attention/portable/attention.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Returns the shared memory of a CTA on the current device, and raises the kernel's limit to it
// once per device.
template <typename First, typename Second, typename Params>
inline cudaError_t prepare_attention(int* shared_bytes) {
  return once_per_device(shared_bytes, [](int device, int* bytes) {
    int major = 0, minor = 0;
    cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (status != cudaSuccess) return status;
    *bytes = First::Tile::shared_bytes(10 * major + minor);
    if constexpr (!std::is_void_v<Second>) {
      const int second = Second::Tile::shared_bytes(10 * major + minor);
      *bytes = *bytes > second ? *bytes : second;
    }
    return cudaFuncSetAttribute(attention_kernel<First, Second, Params>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, *bytes);
  });
}

template <typename First, typename Second, typename Params>
inline cudaError_t count_ctas_per_sm(int* ctas) {
  int shared_bytes = 0;
  const cudaError_t status = prepare_attention<First, Second, Params>(&shared_bytes);
  if (status != cudaSuccess) return status;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      ctas, attention_kernel<First, Second, Params>, kAttentionThreads, shared_bytes);
}

template <typename First, typename Second, typename Params>
inline cudaError_t launch_attention(const Params& params, bool enable_pdl, cudaStream_t stream) {
  using Tile = typename First::Tile;
  int shared_bytes = 0;
  cudaError_t status = prepare_attention<First, Second, Params>(&shared_bytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(params.num_ctas.divisor * params.num_kv_heads.divisor, Tile::kNumOutputParts);
  status = launch_kernel(attention_kernel<First, Second, Params>, grid, dim3(kAttentionThreads),
                         shared_bytes, stream, enable_pdl, params);
  if (status != cudaSuccess) return status;
  return launch_merge<typename First::Variant, typename Tile::O, Tile::kHeadDimVO>(
      params, enable_pdl, stream);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
