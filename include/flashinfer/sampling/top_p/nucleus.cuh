// Top-p draws from probabilities that read the rows once.
//
// The weights of a tile are added up per octave half, exactly, as integers. An octave half holds
// the values with one exponent and one first binary digit. A row's sums tell in which half, the
// pivot, the nucleus ends: all halves above it are in the nucleus, and none below it is. A token is
// drawn from the halves down to the pivot and is accepted at once if it lies above the pivot. Only
// a token of the pivot needs the exact end of the nucleus; then the pivot's elements are listed. A
// token outside the nucleus is replaced by one drawn from the nucleus alone. So there are at most
// two draws, and the result has the distribution of the nucleus.
//
//   halves kernel    sums per tile and half                                        reads the rows
//   propose kernel   a CTA per row: pivot and token                            reads a tile of each
//   list kernel      the pivot's elements, of the rows whose token is in it      reads those rows
//   settle kernel    accepts or replaces the tokens of these rows
//
// With few rows, or very many, the propose kernel does alone what the last two do. Few rows have a
// cluster each: its CTAs propose the same, and list the elements together.
#pragma once

#include <flashinfer/sampling/top_p/settle.cuh>

#ifndef __CUDACC_RTC__
#include <algorithm>
#endif

namespace flashinfer {

// Grid: output rows, times the CTAs of a cluster with kAlone; 512 threads. With kAlone, dynamic
// shared memory holds the row's list.
template <typename Traits, bool kAlone>
__global__ void __launch_bounds__(512, kAlone ? 1 : 2)
    propose_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  __shared__ NucleusStorage storage;
  if (threadIdx.x == 0) storage.list_size = 0;
  // The first CTA's list may be written to only once that CTA runs; the matching wait precedes the
  // writes.
  if constexpr (kAlone) ptx::cluster_arrive();
  const uint32_t rank = kAlone ? ptx::cluster_rank() : 0;
  const bool is_writer = rank == 0 && threadIdx.x == 0;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const detail::NucleusWorkspace workspace(params);
  const uint32_t out_row = kAlone ? ptx::cluster_index() : blockIdx.x;
  const uint64_t input_row = detail::input_row_of(params, out_row);
  const bool exists = input_row < params.num_input_rows;
  const float p = params.top_p[exists ? static_cast<uint32_t>(input_row) : 0];
  detail::RowHalves halves;
  halves.load(storage, workspace, exists ? input_row : 0, exists ? workspace.num_tiles : 0);
  const uint64_t bits = detail::row_bits(params, out_row);
  const bool valid = detail::has_distribution<false>(halves.max) && p == p;
  if (is_writer) {
    if (params.valid) params.valid[out_row] = valid;
    if (!valid) detail::write_token(params, out_row, 0);
  }
  if (!valid) return;

  // Finds the first half, from the largest element's octave on, with which the target is reached.
  uint64_t deeper;
  const ulonglong2 weights = halves.add_up(storage, &deeper);
  const uint64_t inclusive = warp_inclusive_sum(weights.x + weights.y);
  const uint64_t total = __shfl_sync(0xffffffffu, inclusive, 31) + deeper;
  const uint64_t wanted = detail::top_p_target(p, total);
  const uint32_t reached = __ballot_sync(0xffffffffu, inclusive >= wanted);
  const uint32_t octave = reached ? __ffs(static_cast<int>(reached)) - 1 : 31;
  uint64_t before = __shfl_sync(0xffffffffu, inclusive - weights.x - weights.y, octave);
  const uint64_t upper = __shfl_sync(0xffffffffu, weights.x, octave);
  const bool is_lower = before + upper < wanted;
  if (is_lower) before += upper;
  const uint32_t depth = 2 * octave + is_lower;
  const bool keeps_all = p >= 1.f;
  // A tile's last octave also holds everything deeper.
  const bool is_too_deep = octave >= 31 || depth + 2 > halves.top;

  const T* row = static_cast<const T*>(params.input) + input_row * params.input_stride;
  NucleusLayout::Pending pending{};
  pending.row = out_row;
  pending.value = negative_infinity();  // less than any threshold
  if (keeps_all || !is_too_deep) {
    pending.half = halves.top - depth;
    halves.add_up_tiles(storage, keeps_all ? 0xffffffffu : depth + 1);
    __syncthreads();
    const float floor = keeps_all ? negative_infinity() : detail::half_start(pending.half);
    detail::draw_by_tiles(storage, params, row, halves.top, floor, bits);
    __syncthreads();
    pending.token = storage.token;
    pending.value = storage.value;
    if (keeps_all || detail::half_of(pending.value) > pending.half) {
      if (is_writer) detail::write_token(params, out_row, pending.token);
      return;
    }
    // Counted in mantissas of the pivot.
    const uint64_t left = wanted - before;
    pending.needed = octave <= 20 ? (left + (uint64_t{1} << (20 - octave)) - 1) >> (20 - octave)
                                  : left << (octave - 20);
  }
  if constexpr (kAlone) {
    extern __shared__ uint32_t own_list[];
    constexpr int kTiles = NucleusLayout::kTilesPerList;
    uint32_t list_size = NucleusLayout::kCapacity + 1;
    if (!is_too_deep) {
      const detail::ClusterList list(&storage.list_size, own_list);
      float x[kTiles * StreamLayout::kTileSize / 512];
      ptx::cluster_wait();
#pragma unroll 1
      for (uint32_t tile = kTiles * rank; tile < workspace.num_tiles;
           tile += kTiles * ptx::cluster_size()) {
        detail::load_tiles<kTiles, 512>(row, params.vocab_size, tile, x);
        detail::append_half<StreamLayout::kTileSize / 512>(x, pending.half, tile, list);
      }
      ptx::cluster_arrive();
      if (rank != 0) return;
      ptx::cluster_wait();
      list_size = storage.list_size;
      __syncthreads();
    }
    if (rank != 0) return;
    detail::settle<Traits>(params, storage, workspace, pending, list_size, own_list);
  } else if (threadIdx.x == 0) {
    pending.list_size = is_too_deep ? NucleusLayout::kCapacity + 1 : 0;
    workspace.pending[atomicAdd(workspace.num_pending, 1u)] = pending;
  }
}

// Grid (groups of tiles, any number of rows at a time), 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512)
    list_pivot_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  constexpr int kPerTile = StreamLayout::kTileSize / 512, kTiles = NucleusLayout::kTilesPerList;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const detail::NucleusWorkspace workspace(params);
  // The first entry is fetched before it is known to exist.
  NucleusLayout::Pending pending = workspace.pending[blockIdx.y];
  const uint32_t num_pending = *workspace.num_pending;
  for (uint32_t i = blockIdx.y; i < num_pending; i += gridDim.y) {
    if (i != blockIdx.y) pending = workspace.pending[i];
    const T* row = static_cast<const T*>(params.input) +
                   detail::input_row_of(params, pending.row) * params.input_stride;
    float x[kTiles * kPerTile];
    detail::load_tiles<kTiles, 512>(row, params.vocab_size, blockIdx.x * kTiles, x);
    const detail::GlobalList list{&workspace.pending[i].list_size, workspace.list(i)};
    detail::append_half<kPerTile>(x, pending.half, blockIdx.x * kTiles, list);
  }
}

// Grid: any number of rows at a time; 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512, 1)
    settle_kernel(const __grid_constant__ SamplingParams params) {
  __shared__ NucleusStorage storage;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const detail::NucleusWorkspace workspace(params);
  NucleusLayout::Pending pending = workspace.pending[blockIdx.x];
  const uint32_t num_pending = *workspace.num_pending;
  for (uint32_t i = blockIdx.x; i < num_pending; i += gridDim.x) {
    if (i != blockIdx.x) pending = workspace.pending[i];
    detail::settle<Traits>(params, storage, workspace, pending, pending.list_size,
                           workspace.list(i));
    __syncthreads();
  }
}

#ifndef __CUDACC_RTC__

namespace detail {

// Clusters for few rows, if the device can run them.
template <typename Traits>
inline cudaError_t launch_propose_alone(const SamplingParams& params, int device, bool enable_pdl,
                                        cudaStream_t stream) {
  constexpr auto kKernel = propose_kernel<Traits, true>;
  constexpr size_t kListBytes = NucleusLayout::kCapacity * sizeof(uint32_t);
  constexpr uint32_t kFewRows = 8, kMaxRanks = 8;
  const uint32_t groups =
      ceil_div(StreamLayout::num_tiles(params.vocab_size), NucleusLayout::kTilesPerList);
  const uint32_t num_ranks = params.num_rows < kFewRows ? std::min(groups, kMaxRanks) : 1;
  const dim3 threads(512);
  if (num_ranks > 1) {
    int num_clusters = 0;
    cudaError_t status =
        count_active_clusters<kKernel>(device, threads.x, kListBytes, num_ranks, &num_clusters);
    if (status != cudaSuccess) return status;
    if (num_clusters > 0) {
      status = launch_kernel(kKernel, dim3(params.num_rows * num_ranks), threads, kListBytes,
                             stream, enable_pdl, params, num_ranks);
      if (status == cudaSuccess) return status;
      // A stream that is confined to a part of the device may have less room.
      cudaGetLastError();
    }
  }
  return launch_kernel(kKernel, dim3(params.num_rows), threads, kListBytes, stream, enable_pdl,
                       params);
}

}  // namespace detail

template <typename Traits>
inline cudaError_t launch_nucleus_sampling(const SamplingParams& params, int device,
                                           bool enable_pdl, cudaStream_t stream) {
  cudaError_t status = launch_tiles(halves_kernel<Traits>, kHalvesThreads, params.num_input_rows,
                                    params, enable_pdl, stream);
  if (status != cudaSuccess) return status;
  if (!NucleusLayout::lists_pending(params.num_rows) || params.num_input_rows == 0) {
    return detail::launch_propose_alone<Traits>(params, device, enable_pdl, stream);
  }
  const dim3 rows(params.num_rows), threads(512);
  status =
      launch_kernel(propose_kernel<Traits, false>, rows, threads, 0, stream, enable_pdl, params);
  // CTAs without work cost time as well, so there is about one per SM.
  constexpr uint32_t kMaxLists = 128, kMaxSettled = 128;
  if (status == cudaSuccess) {
    const uint32_t groups =
        ceil_div(StreamLayout::num_tiles(params.vocab_size), NucleusLayout::kTilesPerList);
    const dim3 grid(groups, std::min(params.num_rows, ceil_div(kMaxLists, groups)));
    status = launch_kernel(list_pivot_kernel<Traits>, grid, threads, 0, stream, enable_pdl, params);
  }
  if (status == cudaSuccess) {
    status = launch_kernel(settle_kernel<Traits>, dim3(std::min(params.num_rows, kMaxSettled)),
                           threads, 0, stream, enable_pdl, params);
  }
  return status;
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
