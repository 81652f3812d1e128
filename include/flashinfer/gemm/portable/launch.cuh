// Host side of the products that read weights once.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/gemm/portable/kernel.cuh>

#ifndef __CUDACC_RTC__

namespace flashinfer {

template <typename Tile>
inline cudaError_t launch_weight_gemm(const WeightGemmParams& params, bool enable_pdl,
                                      cudaStream_t stream) {
  int ready = 0;
  const cudaError_t status = once_per_device(&ready, [](int, int* value) {
    *value = 1;
    return cudaFuncSetAttribute(weight_gemm_kernel<Tile>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  });
  if (status != cudaSuccess) return status;
  const uint32_t columns = Tile::kGated ? params.n / 2 : params.n;
  // Tiles of the same weights are neighbours, so that memory is read once for all of them.
  const dim3 grid(Tile::kSplits, params.token_tiles,
                  ceil_div<uint32_t>(columns, Tile::kOutColumns));
  return launch_kernel(weight_gemm_kernel<Tile>, grid, dim3(Tile::kThreads), Tile::kSharedBytes,
                       stream, enable_pdl, params, Tile::kSplits > 1 ? Tile::kSplits : 0);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
