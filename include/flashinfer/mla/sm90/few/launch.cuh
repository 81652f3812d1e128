// Host side of the MLA kernel for few rows of 16 bits.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/mla/sm90/few/mla.cuh>

#ifndef __CUDACC_RTC__

namespace flashinfer {

template <typename Tile>
inline cudaError_t launch_mla_few(const MlaParams& params, bool enable_pdl, cudaStream_t stream) {
  int prepared = 0;
  const cudaError_t status = once_per_device(&prepared, [](int, int* done) {
    *done = 1;
    return cudaFuncSetAttribute(mla_few_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Tile::kSharedBytes);
  });
  if (status != cudaSuccess) return status;
  MlaSm90Params few = {};
  few.mla = params;
  few.box_rows = mla_box_rows(params.page_size.divisor, Tile::kBlock);
  encode_mla_boxes<Tile>(few);
  const uint32_t num_ctas = Tile::kInPairs ? params.num_items : params.num_ctas;
  return launch_kernel(mla_few_kernel<Tile>, dim3(num_ctas), dim3(Tile::kThreads),
                       Tile::kSharedBytes, stream, enable_pdl, few, Tile::kInPairs ? 2 : 0);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
