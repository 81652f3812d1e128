// Host side of the attention kernels.
#pragma once

#include <flashinfer/attention/attention.cuh>
#include <flashinfer/common/launch.cuh>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Shared memory of a CTA on the current device; also raises the kernel's limit to it, once per
// device: the attribute stays.
template <typename First, typename Second, typename Params>
inline cudaError_t prepare_attention(int* shared_bytes) {
  constexpr int kMaxDevices = 64;
  static int prepared[kMaxDevices] = {};
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (prepared[device] == 0) {
    int major = 0, minor = 0;
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (status != cudaSuccess) return status;
    int bytes = First::Tile::shared_bytes(10 * major + minor);
    if constexpr (!std::is_void_v<Second>) {
      const int second = Second::Tile::shared_bytes(10 * major + minor);
      bytes = bytes > second ? bytes : second;
    }
    status = cudaFuncSetAttribute(attention_kernel<First, Second, Params>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
    prepared[device] = bytes;
  }
  *shared_bytes = prepared[device];
  return cudaSuccess;
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
