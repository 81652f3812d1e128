// Top-p draws. The nucleus is not searched for: a token is drawn from the whole row, and belongs to
// the nucleus if the elements that are larger weigh less than p * total. If it does not, the next
// one is drawn from the larger elements only, which still hold the nucleus. Whatever is accepted is
// distributed as the nucleus is.
//
//   tile kernel       weights per tile (stream.cuh)                             reads the rows
//   propose kernel    draws a token per row                                     reads one tile of
//   each above kernel      weight of the larger elements, per tile                   reads the rows
//   settle kernel     accepts, or goes on alone: at most kMaxRounds more draws, then the exact
//   search of select.cuh
//
// A share p of the first draws is accepted, and of the second ones nearly all: two reads of the
// row. Searching the threshold instead, by a cluster that keeps the row in shared memory
// (select.cuh), took 20, 68 and 200 us for 1, 64 and 256 rows of 128256 float32 on an H200: one
// read, but a long chain of walks and cluster barriers.
#pragma once

#include <flashinfer/sampling/stream.cuh>

namespace flashinfer {

namespace detail {

struct NucleusWorkspace {
  TileStat* stats;    // [num_input_rows, num_tiles]
  DrawState* states;  // [num_rows]
  uint64_t* above;    // [num_rows, num_tiles]

  __device__ __forceinline__ NucleusWorkspace(const SamplingParams& params) {
    const uint32_t num_tiles = StreamLayout::num_tiles(params.vocab_size);
    stats = static_cast<TileStat*>(params.workspace);
    states = reinterpret_cast<DrawState*>(stats + uint64_t{params.num_input_rows} * num_tiles);
    above = reinterpret_cast<uint64_t*>(states + params.num_rows);
  }
};

// The least float that is larger.
__device__ __forceinline__ float next_above(float x) { return key_to_float(float_to_key(x) + 1); }

}  // namespace detail

// Grid: output rows; 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512, 1)
    propose_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  __shared__ uint64_t warp_values[16];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const detail::NucleusWorkspace workspace(params);
  const uint32_t out_row = blockIdx.x, num_tiles = StreamLayout::num_tiles(params.vocab_size);
  const uint64_t input_row = detail::input_row_of(params, out_row);
  const bool exists = input_row < params.num_input_rows;
  detail::TileSums<typename Traits::Weight> tiles;
  tiles.load(workspace.stats + (exists ? input_row * num_tiles : 0), exists ? num_tiles : 0);
  const float p = params.top_p[exists ? static_cast<uint32_t>(input_row) : 0];
  const bool valid = detail::has_distribution<Traits::kLogits>(tiles.max) && p == p;
  DrawState& state = workspace.states[out_row];
  if (threadIdx.x == 0 && params.valid) params.valid[out_row] = valid;
  if (!valid) {
    if (threadIdx.x == 0) {
      detail::write_token(params, out_row, 0);
      state.is_settled = 1;
    }
    return;
  }
  uint64_t target;
  float tile_max;
  const uint32_t tile =
      tiles.find(__umul64hi(detail::row_bits(params, out_row), tiles.total), &target, &tile_max);
  const T* row = static_cast<const T*>(params.input) + input_row * params.input_stride;
  detail::draw_from_tile(row, params.vocab_size, tile, typename Traits::Weight(tile_max, 1.f),
                         negative_infinity(), target, warp_values, [&](uint32_t token) {
                           detail::write_token(params, out_row, token);
                           state = {tiles.total, tiles.max, to_float(row[token]), token, p >= 1.f};
                         });
}

// Grid (tiles, output rows from first_row on), 256 threads.
template <typename Traits>
__global__ void __launch_bounds__(256) above_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  constexpr int kThreads = 256, kVecSize = 16 / sizeof(T);
  constexpr int kVecs = StreamLayout::kTileSize / kThreads / kVecSize;
  __shared__ uint64_t warp_sum[kThreads / 32];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const detail::NucleusWorkspace workspace(params);
  const uint32_t tile = blockIdx.x, num_tiles = gridDim.x;
  const uint32_t out_row = static_cast<uint32_t>(params.first_row) + blockIdx.y;
  const DrawState state = workspace.states[out_row];
  if (state.is_settled) return;
  const T* row = static_cast<const T*>(params.input) +
                 detail::input_row_of(params, out_row) * params.input_stride;
  const bool aligned = detail::row_is_aligned(row);
  float x[kVecs][kVecSize];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    detail::load_elements(row, aligned, params.vocab_size,
                          tile * StreamLayout::kTileSize + (i * kThreads + threadIdx.x) * kVecSize,
                          x[i]);
  }
  const typename Traits::Weight weight(state.max, 1.f);
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) sum += x[i][j] > state.pivot ? weight(x[i][j]) : 0;
  }
  sum = warp_sum_u64(sum);
  if (threadIdx.x % 32 == 0) warp_sum[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) sum += warp_sum[w];
    workspace.above[uint64_t{out_row} * num_tiles + tile] = sum;
  }
}

// Grid: output rows; 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512, 1)
    settle_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  constexpr uint32_t kMaxRounds = 4;
  __shared__ SelectStorage storage;
  __shared__ uint64_t warp_values[32];
  __shared__ uint32_t next_token;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const detail::NucleusWorkspace workspace(params);
  const uint32_t out_row = blockIdx.x, num_tiles = StreamLayout::num_tiles(params.vocab_size);
  const DrawState state = workspace.states[out_row];
  if (state.is_settled) return;
  const uint32_t input_row = static_cast<uint32_t>(detail::input_row_of(params, out_row));
  const float p = params.top_p[input_row];
  const uint64_t wanted = detail::top_p_target(p, state.total);

  // Every warp sums on its own; the tile where the second draw falls is found on the way.
  const uint64_t* above = workspace.above + uint64_t{out_row} * num_tiles;
  const uint32_t lane_idx = threadIdx.x % 32;
  uint64_t larger = 0;
  for (uint32_t i = lane_idx; i < num_tiles; i += 32) larger += above[i];
  larger = warp_sum_u64(larger);
  if (larger < wanted) return;  // the proposed token stays

  const T* row = static_cast<const T*>(params.input) + input_row * params.input_stride;
  const typename Traits::Weight weight(state.max, 1.f);
  uint64_t target = __umul64hi(detail::row_bits(params, out_row, 1), larger);
  uint32_t tile = 0;
  for (uint32_t base = 0; base < num_tiles; base += 32) {
    const uint64_t value = base + lane_idx < num_tiles ? above[base + lane_idx] : 0;
    const uint64_t inclusive = warp_inclusive_sum(value);
    const uint32_t passed = __ballot_sync(0xffffffffu, inclusive > target);
    if (passed) {
      const int lane = __ffs(static_cast<int>(passed)) - 1;
      tile = base + lane;
      target -= __shfl_sync(0xffffffffu, inclusive - value, lane);
      break;
    }
    target -= __shfl_sync(0xffffffffu, inclusive, 31);
  }
  float pivot = detail::next_above(state.pivot);
  detail::draw_from_tile(row, params.vocab_size, tile, weight, pivot, target, warp_values,
                         [&](uint32_t token) { next_token = token; });

  RowCluster<T, false> whole(row, params.vocab_size, nullptr, 0, warp_values);
  for (uint32_t round = 2; round < kMaxRounds + 2; ++round) {
    __syncthreads();
    const uint32_t token = next_token;
    pivot = detail::next_above(to_float(row[token]));
    const uint64_t* list = whole.gather(detail::warp_weight(whole, weight, pivot));
    larger = whole.sum_list(list, whole.num_warps);
    if (larger < wanted) {
      if (threadIdx.x == 0) detail::write_token(params, out_row, token);
      return;
    }
    const uint64_t drawn = __umul64hi(detail::row_bits(params, out_row, round), larger) -
                           whole.sum_list(list, whole.warp_idx);
    if (drawn < list[whole.warp_idx]) {
      const uint32_t found = detail::find_in_stretch(whole, weight, pivot, drawn);
      if (lane_idx == 0) next_token = found;
    }
  }
  const RowMaxima maxima{state.max, negative_infinity(), negative_infinity()};
  __syncthreads();
  const float threshold = detail::find_threshold<Traits>(whole, storage, maxima, weight, 0, p, 0.f);
  detail::draw_from_row(params, whole, weight, threshold,
                        detail::row_bits(params, out_row, kMaxRounds + 2), out_row);
}

#ifndef __CUDACC_RTC__

template <typename Traits>
inline cudaError_t launch_nucleus_sampling(SamplingParams params, bool enable_pdl,
                                           cudaStream_t stream) {
  cudaError_t status = launch_tiles(tile_kernel<Traits>, kTileThreads<Traits>,
                                    params.num_input_rows, params, enable_pdl, stream);
  const dim3 rows(params.num_rows), threads(512);
  if (status == cudaSuccess) {
    status = launch_kernel(propose_kernel<Traits>, rows, threads, 0, stream, enable_pdl, params);
  }
  if (status == cudaSuccess) {
    status = launch_tiles(above_kernel<Traits>, 256, params.num_rows, params, enable_pdl, stream);
  }
  if (status == cudaSuccess) {
    status = launch_kernel(settle_kernel<Traits>, rows, threads, 0, stream, enable_pdl, params);
  }
  return status;
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
