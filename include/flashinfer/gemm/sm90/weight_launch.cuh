// Host side of the products that stream 4-bit weights on Hopper.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/gemm/sm90/weight_kernel.cuh>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Boxes of codes, 128 bytes of 64 rows with the 128-byte swizzle, and of scales, 16 bytes as many.
// Of a CTA's only tile, boxes of all operands that have the whole stage: codes and activations are
// lines of 128 bytes, all rows' first ones, then all rows' second ones.
template <typename Tile>
inline bool encode_weight_maps(WeightStreamParams& kernel) {
  using Scale = typename Tile::Scale;
  const WeightGemmParams& p = kernel.gemm;
  const uint64_t groups = p.offsets == nullptr ? 1 : p.num_groups;
  constexpr uint32_t kRows = Tile::kOnce ? Tile::kColumns : Tile::kBoxRows;
  const ptx::TensorMapDim group = {groups, p.weight_group_stride, 1};
  const ptx::TensorMapDim lines = {p.k / 2 / Tile::kRowBytes, Tile::kRowBytes, Tile::kParts / 2};
  const ptx::TensorMapDim codes[2] = {{p.n, p.weight_stride, kRows}, Tile::kOnce ? lines : group};
  const uint64_t length = Tile::kOnce ? Tile::kRowBytes : p.k / 2;
  if (!ptx::encode_tensor_map<uint8_t>(kernel.codes, p.weights, length, Tile::kRowBytes, codes)) {
    return false;
  }
  if constexpr (Tile::kOnce) {
    kernel.box_tokens = p.m < Tile::kTokens ? p.m : Tile::kTokens;
    const ptx::TensorMapDim dims[2] = {{p.m, p.a_stride, kernel.box_tokens},
                                       {p.k / 64, 64, Tile::kParts * 2}};
    if (!ptx::encode_tensor_map<uint16_t>(kernel.activations, p.a, 64, 64, dims)) return false;
  }
  if constexpr (Tile::kHasBoxes) {
    const ptx::TensorMapDim scales[2] = {{p.n, p.scale_stride, kRows},
                                         {groups, p.scale_group_stride, 1}};
    return ptx::encode_tensor_map<Scale>(kernel.scales, p.scales, p.k / Tile::kGroup,
                                         Tile::kBoxBytes / sizeof(Scale), scales,
                                         CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  return true;
}

// k is a multiple of 256; scales begin, and have strides, at multiples of 16 bytes.
template <typename Tile>
inline cudaError_t launch_weight_stream(const WeightGemmParams& params, bool enable_pdl,
                                        cudaStream_t stream) {
  int num_sms = 0;
  const cudaError_t status = once_per_device(&num_sms, [](int device, int* count) {
    const cudaError_t limit =
        cudaFuncSetAttribute(weight_stream_kernel<Tile>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
    if (limit != cudaSuccess) return limit;
    return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  });
  if (status != cudaSuccess) return status;
  WeightStreamParams kernel = {};
  kernel.gemm = params;
  if (params.k % 256 != 0 || (Tile::kOnce && params.offsets != nullptr) ||
      !encode_weight_maps<Tile>(kernel)) {
    return cudaErrorInvalidValue;
  }
  const uint32_t columns =
      ceil_div<uint32_t>(Tile::kGated ? params.n / 2 : params.n, Tile::kOutColumns);
  const uint32_t tiles = columns * params.token_tiles;
  const uint32_t most = num_sms * Tile::kLeastCtas;  // persistent CTAs that are at work together
  const uint32_t clusters = Tile::kOnce || tiles < most ? tiles : most;
  return launch_kernel(weight_stream_kernel<Tile>, dim3(clusters * Tile::kSplits),
                       dim3(Tile::kThreads), Tile::kSharedBytes, stream, enable_pdl, kernel,
                       Tile::kSplits > 1 ? Tile::kSplits : 0);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
