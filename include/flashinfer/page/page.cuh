// Appending rows to a paged cache: a copy whose destination each token looks up.
//
// The copy knows no element type, only units of 16 bytes (or of what sizes and alignment allow). A
// thread moves one unit: threadIdx.x runs over the units of a head in both operands, threadIdx.y
// over heads, threadIdx.z over tokens. It loads its unit before it looks the slot up, so that the
// two latencies overlap.
#pragma once

#include <flashinfer/common/head_grid.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/layout/page_table.cuh>
#include <flashinfer/page/page_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename Unit>
__global__ void __launch_bounds__(512) append_kernel(const __grid_constant__ AppendParams params) {
  const uint32_t token = blockIdx.x * blockDim.z + threadIdx.z;
  const uint32_t head = blockIdx.y * blockDim.y + threadIdx.y;
  const uint32_t units_0 = params.operands[0].row_bytes / sizeof(Unit);
  const uint32_t num_units = units_0 + params.operands[1].row_bytes / sizeof(Unit);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (token >= params.num_tokens || head >= params.num_heads) return;
  for (uint32_t i = threadIdx.x; i < num_units; i += blockDim.x) {
    const AppendOperand& operand = params.operands[i < units_0 ? 0 : 1];
    const int64_t offset = (i < units_0 ? i : i - units_0) * sizeof(Unit);
    const char* source = static_cast<const char*>(operand.source) +
                         token * operand.source_stride_token + head * operand.source_stride_head;
    const Unit unit = *reinterpret_cast<const Unit*>(source + offset);
    const PageSlot slot = find_slot(params.table, token);
    if (!slot.exists) return;
    char* cache = static_cast<char*>(operand.cache) + slot.page * operand.cache_stride_page +
                  slot.slot * operand.cache_stride_slot + head * operand.cache_stride_head;
    *reinterpret_cast<Unit*>(cache + offset) = unit;
  }
}

namespace detail {

// Number of entries of indptr[first .. last) that are at most `i`, plus `first`: the upper bound of
// a sorted array.
__device__ __forceinline__ uint32_t upper_bound(const int32_t* indptr, uint32_t first,
                                                uint32_t last, int32_t i) {
  while (first < last) {
    const uint32_t middle = (first + last) / 2;
    if (indptr[middle] <= i) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

}  // namespace detail

// The request and position of each appended token; one thread per token.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    batch_indices_kernel(const __grid_constant__ BatchIndicesParams params) {
  // The search is a chain of dependent loads, so it runs on a copy in shared memory where that
  // fits.
  constexpr uint32_t kMaxShared = 2048;
  __shared__ int32_t shared_indptr[kMaxShared];
  const uint32_t num_bounds = params.batch_size + 1;
  const uint32_t token = blockIdx.x * kThreads + threadIdx.x;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int32_t* indptr = params.append_indptr;
  if (num_bounds <= kMaxShared) {
    for (uint32_t i = threadIdx.x; i < num_bounds; i += kThreads) shared_indptr[i] = indptr[i];
    __syncthreads();
    indptr = shared_indptr;
  }
  if (token >= params.num_tokens) return;
  const uint32_t bound = detail::upper_bound(indptr, 0, num_bounds, static_cast<int32_t>(token));
  int32_t request = -1, position = 0;
  if (bound != 0 && bound != num_bounds) {
    request = static_cast<int32_t>(bound - 1);
    // The last token of a request is at seq_len - 1.
    position = params.seq_lens[request] - indptr[bound] + static_cast<int32_t>(token);
  }
  params.batch_indices[token] = request;
  params.positions[token] = position;
}

// (pages - 1) * page_size + last_page_len, and last_page_len for a request without pages.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    seq_lens_kernel(const __grid_constant__ SeqLensParams params) {
  const uint32_t request = blockIdx.x * kThreads + threadIdx.x;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (request >= params.batch_size) return;
  const int32_t num_pages = params.kv_indptr[request + 1] - params.kv_indptr[request];
  const int32_t full_pages = num_pages > 1 ? num_pages - 1 : 0;
  params.seq_lens[request] =
      full_pages * static_cast<int32_t>(params.page_size) + params.kv_last_page_len[request];
}

#ifndef __CUDACC_RTC__

// `unit_bytes`: 16, 4, 2 or 1; divides every size and stride of the operands and every address.
inline cudaError_t launch_append(const AppendParams& params, uint32_t unit_bytes, bool enable_pdl,
                                 cudaStream_t stream) {
  constexpr uint32_t kThreads = 256;
  const uint32_t num_units =
      (params.operands[0].row_bytes + params.operands[1].row_bytes) / unit_bytes;
  const HeadGrid shape = make_head_grid(params.num_tokens, params.num_heads, num_units, kThreads);
  void (*kernel)(AppendParams) = unit_bytes == 16  ? append_kernel<uint4>
                                 : unit_bytes == 4 ? append_kernel<uint32_t>
                                 : unit_bytes == 2 ? append_kernel<uint16_t>
                                                   : append_kernel<uint8_t>;
  return launch_kernel(kernel, shape.grid, shape.block, 0, stream, enable_pdl, params);
}

inline cudaError_t launch_batch_indices(const BatchIndicesParams& params, bool enable_pdl,
                                        cudaStream_t stream) {
  constexpr int kThreads = 256;
  return launch_kernel(batch_indices_kernel<kThreads>,
                       dim3(ceil_div<uint32_t>(params.num_tokens, kThreads)), dim3(kThreads), 0,
                       stream, enable_pdl, params);
}

inline cudaError_t launch_seq_lens(const SeqLensParams& params, bool enable_pdl,
                                   cudaStream_t stream) {
  constexpr int kThreads = 256;
  return launch_kernel(seq_lens_kernel<kThreads>,
                       dim3(ceil_div<uint32_t>(params.batch_size, kThreads)), dim3(kThreads), 0,
                       stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
