// Appends rows to a paged cache: a copy whose destination each token looks up.
//
// The copy knows no element type, only units of 16 bytes (or of what sizes and alignment allow). A
// thread moves one or two units of a row. A CTA works on one of the two tensors, whose threads are
// numbered by unit, then head, then token. A thread loads its units before it looks up the slot, so
// that the two latencies overlap.
//
// Measurements, also of what lost: docs/tuning/rope_page_merge.md.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/layout/page_table.cuh>
#include <flashinfer/page/page_params.h>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/prefetch.cuh>

namespace flashinfer {

// Threads of a CTA. The source streams if the cache fits in L2, and the cache streams if it does
// not. A short grid prefetches its rows to L2 while the preceding grid ends; a long grid gains
// nothing by it.
template <int kUnits>
inline constexpr int kAppendThreads = 256 / kUnits;
inline constexpr uint64_t kAppendStreamBytes = uint64_t{64} << 20;
inline constexpr uint32_t kAppendPrefetchCtas = 1024;
// If the cache does not fit in L2, a CTA also prefetches the rows of a token this many bytes later.
inline constexpr uint64_t kAppendBytesAhead = uint64_t{4} << 20;

template <typename Unit, int kUnits>
__global__ void __launch_bounds__(kAppendThreads<kUnits>)
    append_kernel(const __grid_constant__ AppendParams params) {
  const AppendOperand& operand = params.operands[blockIdx.x < params.operands[1].first_cta ? 0 : 1];
  const uint32_t index = (blockIdx.x - operand.first_cta) * kAppendThreads<kUnits> + threadIdx.x;
  const uint32_t row = operand.units.divide(index);
  const int64_t offset = (index - row * operand.units.divisor) * sizeof(Unit);
  const int64_t step = operand.units.divisor * sizeof(Unit);
  const uint32_t token_in_chunk = params.heads.divide(row);
  const uint32_t head = row - token_in_chunk * params.heads.divisor;
  const uint32_t token = blockIdx.y * params.tokens_per_chunk + token_in_chunk;
  const bool is_valid = token_in_chunk < params.tokens_per_chunk && token < params.num_tokens;
  const char* source = static_cast<const char*>(operand.source) +
                       token * operand.source_stride_token + head * operand.source_stride_head +
                       offset;
  if (gridDim.x <= kAppendPrefetchCtas && is_valid) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) ptx::prefetch_l2(source + i * step);
  }
  ptx::grid_launch_and_wait();
  if (!is_valid) return;
  constexpr uint32_t kLineUnits = 128 / sizeof(Unit);
  if (threadIdx.x % kLineUnits == 0 && params.tokens_ahead != 0 &&
      token + params.tokens_ahead < params.num_tokens) {
    const char* later = source + params.tokens_ahead * operand.source_stride_token;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) ptx::prefetch_l2(later + i * step);
  }
  Unit units[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const auto* unit = reinterpret_cast<const Unit*>(source + i * step);
    units[i] = params.streams ? *unit : __ldcs(unit);
  }
  const PageSlot slot = find_slot(params.table, token);
  if (!slot.exists) return;
  char* cache = static_cast<char*>(operand.cache) + slot.page * operand.cache_stride_page +
                slot.slot * operand.cache_stride_slot + head * operand.cache_stride_head + offset;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    auto* unit = reinterpret_cast<Unit*>(cache + i * step);
    if (params.streams) {
      __stcs(unit, units[i]);
    } else {
      *unit = units[i];
    }
  }
}

namespace detail {

// Number of entries of indptr[first .. last) that are at most `i`, plus `first`: the upper bound in
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
  // The search is a chain of dependent loads, so it runs on a copy in shared memory if that fits.
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

// Computes (pages - 1) * page_size + last_page_len, or last_page_len for a request without pages.
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

// `unit_bytes` is 16, 4, 2 or 1, and divides every size and stride of the operands and every
// address.
inline cudaError_t launch_append(AppendParams params, uint32_t unit_bytes, bool enable_pdl,
                                 cudaStream_t stream) {
  constexpr uint32_t kMaxIndex = 1u << 30;  // per thread: FastDivisor takes 31 bits
  const bool is_paired = unit_bytes == 16 && params.operands[0].row_bytes % 32 == 0 &&
                         params.operands[1].row_bytes % 32 == 0;
  const uint32_t thread_bytes = is_paired ? 32 : unit_bytes;
  const uint32_t threads = is_paired ? kAppendThreads<2> : kAppendThreads<1>;
  uint64_t max_threads_per_token = 1, bytes_per_token = 0;
  for (AppendOperand& operand : params.operands) {
    const uint32_t units = operand.row_bytes / thread_bytes;
    bytes_per_token += uint64_t{operand.row_bytes} * params.heads.divisor;
    operand.units = FastDivisor(units < 1 ? 1 : units);
    const uint64_t threads_per_token = uint64_t{units} * params.heads.divisor;
    if (threads_per_token > kMaxIndex) return cudaErrorInvalidValue;
    if (threads_per_token > max_threads_per_token) max_threads_per_token = threads_per_token;
  }
  params.streams = bytes_per_token * params.num_tokens > kAppendStreamBytes;
  params.tokens_ahead = params.streams ? kAppendBytesAhead / bytes_per_token : 0;
  const uint32_t max_tokens = static_cast<uint32_t>(kMaxIndex / max_threads_per_token);
  params.tokens_per_chunk = params.num_tokens < max_tokens ? params.num_tokens : max_tokens;
  uint32_t num_ctas = 0;
  for (AppendOperand& operand : params.operands) {
    operand.first_cta = num_ctas;
    num_ctas += ceil_div<uint32_t>(
        params.tokens_per_chunk * (operand.row_bytes / thread_bytes) * params.heads.divisor,
        threads);
  }
  const dim3 grid(num_ctas, ceil_div(params.num_tokens, params.tokens_per_chunk));
  void (*kernel)(AppendParams) = is_paired          ? append_kernel<uint4, 2>
                                 : unit_bytes == 16 ? append_kernel<uint4, 1>
                                 : unit_bytes == 4  ? append_kernel<uint32_t, 1>
                                 : unit_bytes == 2  ? append_kernel<uint16_t, 1>
                                                    : append_kernel<uint8_t, 1>;
  return launch_kernel(kernel, grid, dim3(threads), 0, stream, enable_pdl, params);
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
