// Host side of the MLA kernel for Hopper.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/mla/merge.cuh>
#include <flashinfer/mla/sm90/mla.cuh>
#include <flashinfer/ptx/tensor_map.h>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Tokens of a box: the largest power of two from 16 to 64 that divides the page, or 0.
inline uint32_t mla_box_rows(uint32_t page_size) {
  const uint32_t step = page_size & -page_size;
  return step < 16 ? 0 : step < 64 ? step : 64;
}

// How a call runs. Pairs win while a launch is short; with many requests, CTAs alone give their KV
// back earlier. Merging in the kernel saves a launch, but after the planner's the many CTAs that
// count parts lose more than that.
struct MlaForm {
  bool pairs;   // of CTAs share their KV rows
  bool merges;  // the kernel merges parts itself
};
inline constexpr uint32_t kMlaMostPaired = 64;        // requests
inline constexpr uint32_t kMlaMostMergedAtOnce = 32;  // requests of a plan of the device
inline constexpr bool kMlaMergesOlderPlans = true;
template <typename Tile>
inline MlaForm choose_mla_form(const MlaSm90Params& params) {
  const MlaParams& mla = params.mla;
  // Then CTAs 2 i and 2 i + 1 always have the same KV rows: tiles of the same token.
  const bool shares = (Tile::kWidens || params.box_rows != 0) && mla.num_heads.divisor % 128 == 0 &&
                      mla.num_ctas % 2 == 0;
  return {Tile::kPairs && shares && (Tile::kWidens || mla.num_requests <= kMlaMostPaired),
          mla.plan_is_older ? kMlaMergesOlderPlans : mla.num_requests <= kMlaMostMergedAtOnce};
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
  const MlaForm form = choose_mla_form<Tile>(sm90);
  if (!merges || !form.merges) sm90.mla.counters = nullptr;
  cudaError_t status = cudaSuccess;
  if constexpr (Tile::kPairs) {
    if (form.pairs) status = launch_mla_sm90<Tile, 2>(sm90, enable_pdl, stream);
  }
  if (!form.pairs) status = launch_mla_sm90<Tile, 1>(sm90, enable_pdl, stream);
  if (status != cudaSuccess || !merges || form.merges) return status;
  return launch_mla_merge<typename Tile::O, Tile::kDimCkv>(sm90.mla, enable_pdl, stream);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
