// Copies keys and values out of pages into rows that follow each other, one request after another.
//
// TMA loads tokens that lie side by side. Where pages have few of them, copying is worth its time:
// a prefill reads each key many times.
//
// Measurements, also of what lost: docs/tuning/attention_prefill.md.
#pragma once

#include <flashinfer/attention/gather_params.h>
#include <flashinfer/attention/request_of.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

inline constexpr int kGatherWarps = 8;

namespace detail {

// Copies one token's heads with a warp: a lane has up to four loads under way.
// Where the page is outside the cache, the row becomes zeros.
__device__ __forceinline__ void gather_token(const GatherOperand& operand, int64_t page, int slot,
                                             int64_t token, uint32_t lane, bool in_cache) {
  constexpr int kAhead = 4;
  const char* const from = operand.cache + page * operand.page_stride + slot * operand.slot_stride;
  uint4* const to = reinterpret_cast<uint4*>(operand.rows) + token * operand.units_per_token;
  for (uint32_t first = lane; first < operand.units_per_token; first += 32 * kAhead) {
    uint4 units[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t unit = first + 32 * i;
      if (unit >= operand.units_per_token) break;
      const uint32_t head = operand.units_per_row.divide(unit);
      const uint32_t in_row = unit - head * operand.units_per_row.divisor;
      const char* const row = from + head * operand.head_stride;
      units[i] = in_cache ? reinterpret_cast<const uint4*>(row)[in_row] : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t unit = first + 32 * i;
      if (unit < operand.units_per_token) to[unit] = units[i];
    }
  }
}

}  // namespace detail

// Grid (ceil(num_tokens / kGatherWarps)): a warp copies keys and values of one token.
__global__ void __launch_bounds__(32 * kGatherWarps)
    gather_kernel(const __grid_constant__ GatherParams params) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int token = blockIdx.x * kGatherWarps + threadIdx.x / 32;
  if (token >= params.num_tokens) return;
  const int request = request_of(params.token_indptr, params.batch_size, token);
  const uint32_t position = token - params.token_indptr[request];
  const uint32_t page = params.page_size.divide(position);
  const int slot = position - page * params.page_size.divisor;
  const int64_t number = params.pages[params.page_indptr[request] + page];
  const bool in_cache = number >= 0 && number < params.num_pages;
  for (const GatherOperand& operand : params.operands) {
    detail::gather_token(operand, number, slot, token, threadIdx.x % 32, in_cache);
  }
}

#ifndef __CUDACC_RTC__

inline cudaError_t launch_gather(const GatherParams& params, bool enable_pdl, cudaStream_t stream) {
  const unsigned ctas = ceil_div(params.num_tokens, kGatherWarps);
  return launch_kernel(gather_kernel, dim3(ctas), dim3(32 * kGatherWarps), 0, stream, enable_pdl,
                       params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
