// The result of a mixture: a token's rows, times their weights, summed in float32 in the order of
// its choices. So equal calls give equal bits, and other tokens of the batch change nothing.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/moe/moe_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

inline constexpr uint32_t kMoeCombineThreads = 128;
inline constexpr uint32_t kMoeCombineElements = 8;  // of a thread
inline constexpr uint32_t kMoeCombineAtOnce = 8;    // rows that are loaded before one is used

// A CTA has kMoeCombineThreads * kMoeCombineElements columns of one token.
template <typename T, typename Out>
__global__ void __launch_bounds__(kMoeCombineThreads)
    moe_combine_kernel(const __grid_constant__ MoeCombineParams params) {
  constexpr uint32_t kColumns = kMoeCombineThreads * kMoeCombineElements;
  const uint32_t parts = ceil_div(params.hidden, kColumns);
  const uint32_t token = blockIdx.x / parts;
  const uint32_t column =
      (blockIdx.x - token * parts) * kColumns + threadIdx.x * kMoeCombineElements;
  if (!params.starts_early) ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (column >= params.hidden) return;

  const int32_t* const entry_row = params.entry_row + static_cast<uint64_t>(token) * params.top_k;
  const float* const weights = params.weights + static_cast<uint64_t>(token) * params.top_k;
  const T* const rows = static_cast<const T*>(params.rows) + column;
  float sum[kMoeCombineElements] = {};
  for (uint32_t first = 0; first < params.top_k; first += kMoeCombineAtOnce) {
    Vector<T, kMoeCombineElements> values[kMoeCombineAtOnce];
    float weight[kMoeCombineAtOnce];
    uint32_t row_of[kMoeCombineAtOnce];  // a negative one is beyond the last row, too
#pragma unroll
    for (uint32_t j = 0; j < kMoeCombineAtOnce; ++j) {
      const uint32_t choice = first + j;
      row_of[j] = choice < params.top_k ? static_cast<uint32_t>(entry_row[choice]) : UINT32_MAX;
      weight[j] = choice < params.top_k ? weights[choice] : 0.f;
    }
    // Where the row comes from was known before; what it has is not.
    if (first == 0 && params.starts_early) ptx::grid_dependency_wait();
#pragma unroll
    for (uint32_t j = 0; j < kMoeCombineAtOnce; ++j) {
      if (row_of[j] < params.num_rows) values[j].load(rows + row_of[j] * params.rows_stride);
    }
#pragma unroll
    for (uint32_t j = 0; j < kMoeCombineAtOnce; ++j) {
      if (row_of[j] >= params.num_rows) continue;
      float row[kMoeCombineElements];
      values[j].to_floats(row);
#pragma unroll
      for (uint32_t e = 0; e < kMoeCombineElements; ++e) sum[e] += weight[j] * row[e];
    }
  }
  Vector<Out, kMoeCombineElements> result;
  result.from_floats(sum);
  result.store(static_cast<Out*>(params.out) + token * params.out_stride + column);
}

#ifndef __CUDACC_RTC__

// `hidden` is a multiple of kMoeCombineElements; rows begin at multiples of 16 bytes.
template <typename T, typename Out>
inline cudaError_t launch_moe_combine(const MoeCombineParams& params, bool enable_pdl,
                                      cudaStream_t stream) {
  const uint32_t parts = ceil_div(params.hidden, kMoeCombineThreads * kMoeCombineElements);
  return launch_kernel(moe_combine_kernel<T, Out>, dim3(params.num_tokens * parts),
                       dim3(kMoeCombineThreads), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
