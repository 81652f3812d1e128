// Host side of the MLA kernel for Hopper.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/mla/sm90/mla.cuh>
#include <flashinfer/ptx/tensor_map.h>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Tokens of a box: the largest power of two from 16 to 64 that divides the page, or 0.
inline uint32_t mla_box_rows(uint32_t page_size) {
  const uint32_t step = page_size & -page_size;
  return step < 16 ? 0 : step < 64 ? step : 64;
}

// Whether CTAs 2 i and 2 i + 1 always have the same KV rows, which are tiles of the same token.
// Threads that copy rows of 16 bits do so for their own CTA alone.
template <typename Tile>
inline bool mla_runs_in_pairs(const MlaSm90Params& params) {
  return Tile::kPairs && (Tile::kWidens || params.box_rows != 0) &&
         params.mla.num_heads.divisor % 128 == 0 && params.mla.num_ctas % 2 == 0;
}

template <typename Tile, int kSharers>
inline cudaError_t launch_mla_sm90(const MlaSm90Params& params, bool enable_pdl,
                                   cudaStream_t stream) {
  const auto kernel = mla_sm90_kernel<Tile, kSharers>;
  int prepared = 0;
  const cudaError_t status = once_per_device(&prepared, [](int, int* done) {
    *done = 1;
    return cudaFuncSetAttribute(mla_sm90_kernel<Tile, kSharers>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, kMlaSharedBytes<Tile>);
  });
  if (status != cudaSuccess) return status;
  return launch_kernel(kernel, dim3(params.mla.num_ctas), dim3(Tile::kThreads),
                       kMlaSharedBytes<Tile>, stream, enable_pdl, params,
                       kSharers == 1 ? 0 : kSharers);
}

template <typename Tile>
inline cudaError_t launch_mla_sm90(const MlaParams& params, bool merges, bool enable_pdl,
                                   cudaStream_t stream) {
  MlaSm90Params sm90 = {};
  sm90.mla = params;
  sm90.box_rows = Tile::kWidens ? 0 : mla_box_rows(params.page_size.divisor);
  const auto encode = [&](ptx::EncodedTensorMap& map, const MlaCache& cache, uint64_t columns) {
    if (columns == 0 || sm90.box_rows == 0) return;
    const uint32_t page_size = params.page_size.divisor;
    if (!ptx::encode_tensor_map<typename Tile::T>(map, cache.data, columns, 64,
                                                  {{page_size, cache.stride_token, sm90.box_rows},
                                                   {params.num_pages, cache.stride_page, 1}})) {
      sm90.box_rows = 0;
    }
  };
  encode(sm90.ckv, params.ckv, Tile::kDimCkv);
  encode(sm90.kpe, params.kpe, Tile::kDimKpe);
  if (!merges) sm90.mla.counters = nullptr;
  if constexpr (Tile::kPairs) {
    if (mla_runs_in_pairs<Tile>(sm90)) return launch_mla_sm90<Tile, 2>(sm90, enable_pdl, stream);
  }
  return launch_mla_sm90<Tile, 1>(sm90, enable_pdl, stream);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
