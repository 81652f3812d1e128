// Host side of the MLA kernels for few rows.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/mla/sm90/ring_kernel.cuh>

#ifndef __CUDACC_RTC__

namespace flashinfer {

template <typename Attention>
inline cudaError_t launch_mla_ring(const MlaParams& params, bool enable_pdl, cudaStream_t stream) {
  using Tile = typename Attention::Tile;
  int prepared = 0;
  const cudaError_t status = once_per_device(&prepared, [](int, int* done) {
    *done = 1;
    return cudaFuncSetAttribute(mla_ring_kernel<Attention>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  });
  if (status != cudaSuccess) return status;
  MlaSm90Params ring = {};
  ring.mla = params;
  ring.box_rows = mla_box_rows(params.page_size.divisor, Tile::kBlock);
  encode_mla_boxes<Tile>(ring);
  const uint32_t num_ctas = Tile::kInPairs ? params.num_items : params.num_ctas;
  return launch_kernel(mla_ring_kernel<Attention>, dim3(num_ctas), dim3(Tile::kThreads),
                       Tile::kSharedBytes, stream, enable_pdl, ring, Tile::kInPairs ? 2 : 0);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
