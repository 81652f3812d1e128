// Draws that need one look at every element and a second at few: plain sampling, and top-k with
// small k.
//
//   tile kernel     leaves a sum of weights per tile and, for top-k, the maximum of each group of
//                   128 elements                                                  reads the rows
//   finish kernel   one CTA per row: picks a tile by the sums, or collects the elements of the
//                   groups with the largest maxima, and draws
//
// A row whose k largest do not fit the short list (large k, or many equal values) is searched
// whole, by the same steps as in row/sampling.cuh.
#pragma once

#include <flashinfer/sampling/top_p/sums.cuh>
#include <flashinfer/sampling/top_k/groups.cuh>

namespace flashinfer {

namespace detail {

// Draws from a row whose filter keeps what is at least `threshold`. `as_nucleus`: the token that
// top_p/nucleus.cuh would draw. Rows whose own top-k keeps every element need that: with a top-k
// that keeps everything for all rows, such rows go to the nucleus kernels, and the token must be
// the same in both cases. The nucleus kernels draw from the nucleus and the rest of its last half;
// a draw from the nucleus alone replaces a token of that rest.
template <typename Row, typename Weight>
__device__ __forceinline__ void draw_filtered(const SamplingParams& params, Row& row,
                                              const Weight& weight, float max, float threshold,
                                              bool as_nucleus, uint32_t out_row) {
  const uint32_t half = half_of(threshold);
  const bool draws_twice =
      as_nucleus && half_of(max) / 2 - half / 2 < NucleusLayout::kHalves / 2 - 1;
  float from = draws_twice ? half_start(half) : threshold;
  // One loop, so that the search is compiled once.
#pragma unroll 1
  for (uint32_t draw = as_nucleus && !draws_twice;; ++draw) {
    bool is_drawn = false;
    find_in_row(row, weight, from, row_bits(params, out_row, draw), [&](uint32_t token) {
      is_drawn = from == threshold || to_float(row.row[token]) >= threshold;
      if (is_drawn && row.lane_idx == 0) write_token(params, out_row, token);
    });
    if (from == threshold || __syncthreads_or(is_drawn)) return;
    from = threshold;
  }
}

}  // namespace detail

// Grid: output rows; 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512, 1)
    finish_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  __shared__ FinishStorage storage;
  if constexpr (Traits::kTopK) {
    for (uint32_t i = threadIdx.x; i < FinishStorage::kNumBins; i += blockDim.x)
      storage.bins[i] = 0;
    if (threadIdx.x == 0) {
      storage.num_hot = storage.num_candidates = 0;
      storage.top_k_key = storage.top_p_key = 0;
    }
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  const uint32_t out_row = blockIdx.x;
  const uint64_t input_row = detail::input_row_of(params, out_row);
  const bool exists = input_row < params.num_input_rows;
  const uint32_t num_tiles = StreamLayout::num_tiles(params.vocab_size);
  const auto* stats = static_cast<const TileStat*>(params.workspace);
  const auto* group_max =
      reinterpret_cast<const float*>(stats + uint64_t{params.num_input_rows} * num_tiles);
  [[maybe_unused]] detail::GroupKeys groups;
  if constexpr (Traits::kTopK) {
    groups.load(group_max + input_row * num_tiles * StreamLayout::kGroupsPerTile,
                exists ? ceil_div(params.vocab_size, StreamLayout::kGroupSize) : 0);
  }
  detail::TileSums<typename Traits::Weight> tiles;
  tiles.load(stats + (exists ? input_row * num_tiles : 0), exists ? num_tiles : 0);
  const uint64_t bits = detail::row_bits(params, out_row);

  const uint32_t param_row = exists ? static_cast<uint32_t>(input_row) : 0;
  float p = 1.f;
  int32_t k = 0;
  if constexpr (Traits::kTopP) p = params.top_p[param_row];
  if constexpr (Traits::kTopK) k = params.top_k[param_row];
  const bool valid = detail::has_distribution<Traits::kLogits>(tiles.max) && p == p;
  if (threadIdx.x == 0 && params.valid) params.valid[out_row] = valid;
  if (!valid) {
    if (threadIdx.x == 0) detail::write_token(params, out_row, 0);
    return;
  }
  const T* row = static_cast<const T*>(params.input) + input_row * params.input_stride;
  const bool filtered = (k >= 1 && static_cast<uint32_t>(k) < params.vocab_size) || p < 1.f;
  if (!filtered) {
    uint64_t target;
    float tile_max;
    const uint32_t tile = tiles.find(__umul64hi(bits, tiles.total), &target, &tile_max);
    detail::draw_from_tile(
        row, params.vocab_size, tile, typename Traits::Weight(tile_max, 1.f), negative_infinity(),
        target, storage.warp_values,
        [&](uint32_t token, float) { detail::write_token(params, out_row, token); });
    return;
  }
  if constexpr (Traits::kTopK) {
    const typename Traits::Weight weight(tiles.max, 1.f);
    if (k >= 1 && detail::collect_top_groups<Traits>(params, storage, row, groups, tiles.max,
                                                     weight, static_cast<uint32_t>(k))) {
      detail::draw_from_candidates<Traits>(params, storage, static_cast<uint32_t>(k), p,
                                           tiles.total, bits, out_row);
      return;
    }
    __syncthreads();
    RowCluster<T, false> whole(row, params.vocab_size, nullptr, 0, storage.warp_values);
    const RowMaxima maxima{tiles.max, negative_infinity(), negative_infinity()};
    const float threshold =
        detail::find_threshold<Traits>(whole, storage.select, maxima, weight, k, p, 0.f);
    const bool keeps_all = k < 1 || static_cast<uint32_t>(k) >= params.vocab_size;
    detail::draw_filtered(params, whole, weight, tiles.max, threshold,
                          Traits::kTopP && !Traits::kLogits && keeps_all, out_row);
  }
}

#ifndef __CUDACC_RTC__

template <typename Traits>
inline cudaError_t launch_stream_sampling(const SamplingParams& params, bool enable_pdl,
                                          cudaStream_t stream) {
  const cudaError_t status = launch_tiles(tile_kernel<Traits>, kTileThreads<Traits>,
                                          params.num_input_rows, params, enable_pdl, stream);
  if (status != cudaSuccess) return status;
  return launch_kernel(finish_kernel<Traits>, dim3(params.num_rows), dim3(512), 0, stream,
                       enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
