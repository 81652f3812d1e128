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
  MlaFewParams few = {};
  few.mla = params;
  // Tokens of a box: the largest power of two up to a block that divides the page, if it is 16.
  const uint32_t page_size = params.page_size.divisor, step = page_size & -page_size;
  few.box_rows = step < 16 ? 0 : step < Tile::kBlock ? step : Tile::kBlock;
  const auto encode = [&](ptx::EncodedTensorMap& map, const MlaCache& cache, uint64_t columns) {
    if (columns == 0 || few.box_rows == 0) return;
    if (!ptx::encode_tensor_map<typename Tile::T>(map, cache.data, columns, 64,
                                                  {{page_size, cache.stride_token, few.box_rows},
                                                   {params.num_pages, cache.stride_page, 1}})) {
      few.box_rows = 0;
    }
  };
  encode(few.ckv, params.ckv, Tile::kDimCkv);
  encode(few.kpe, params.kpe, Tile::kDimKpe);
  return launch_kernel(mla_few_kernel<Tile>, dim3(params.num_ctas), dim3(Tile::kThreads),
                       Tile::kSharedBytes, stream, enable_pdl, few);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
