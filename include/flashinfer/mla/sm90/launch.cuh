// Host side of the MLA kernel for Hopper.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/mla/sm90/mla.cuh>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Whether CTAs 2 i and 2 i + 1 always have the same KV rows, which are tiles of the same token.
// Threads that copy rows of 16 bits do so for their own CTA alone.
template <typename Tile>
inline bool mla_runs_in_pairs(MlaSm90Params& params) {
  return Tile::kPairs && (Tile::kWidens || params.box_rows != 0) &&
         params.mla.num_heads.divisor % 128 == 0 && params.mla.num_ctas % 2 == 0 &&
         (Tile::kWidens || encode_mla_queries<Tile>(params));
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
  sm90.box_rows = Tile::kWidens ? 0 : mla_box_rows(params.page_size.divisor, Tile::kBlock);
  encode_mla_boxes<Tile>(sm90);
  if (!merges) sm90.mla.counters = nullptr;
  if constexpr (Tile::kPairs) {
    if (mla_runs_in_pairs<Tile>(sm90)) return launch_mla_sm90<Tile, 2>(sm90, enable_pdl, stream);
  }
  return launch_mla_sm90<Tile, 1>(sm90, enable_pdl, stream);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
