// Post mapping of hyper-connections with four streams:
//
//   out[t, n, :] = post_mix[t, n] * x[t, :] + sum over m of comb_mix[t, m, n] * residual[t, m, :]
//
// A thread has the same 16 bytes of columns of all streams of a token: five loads are in flight,
// and every byte is moved once. Threads count over tokens and columns alike, so that one token
// already spreads over several multiprocessors. Computed in float and rounded once.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/mhc/mhc_post_params.h>
#include <flashinfer/mhc/mhc_streams.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

inline constexpr uint32_t kMhcPostThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kMhcPostThreads)
    mhc_post_kernel(const __grid_constant__ MhcPostParams params) {
  constexpr int kStreams = kMhcStreams, kVecSize = 16 / sizeof(T);
  using Elements = Vector<T, kVecSize>;
  const uint32_t index = blockIdx.x * kMhcPostThreads + threadIdx.x;
  const uint32_t token = params.vecs_per_row.divide(index);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (token >= params.num_tokens) return;

  // Addresses count in vectors: by elements, the compiler stores most results in words of 4 bytes.
  const uint32_t row_vecs = params.vecs_per_row.divisor;
  const uint32_t column = index - token * row_vecs;
  const uint64_t first = uint64_t{token} * kStreams * row_vecs + column;
  const auto* x_row = static_cast<const T*>(params.x) + uint64_t{token} * params.hidden_size;
  const T* residual = static_cast<const T*>(params.residual) + first * kVecSize;
  Elements* out = static_cast<Elements*>(params.out) + first;
  Elements x, streams[kStreams];
  x.load_streaming(x_row + column * kVecSize);
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    streams[m].load_streaming(residual + m * params.hidden_size);
  }
  Vector<float, kStreams> post, comb[kStreams];
  post.load(params.post_mix + uint64_t{token} * kStreams);
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    comb[m].load(params.comb_mix + (uint64_t{token} * kStreams + m) * kStreams);
  }

  float sums[kStreams][kVecSize], values[kVecSize];
  x.to_floats(values);
#pragma unroll
  for (int n = 0; n < kStreams; ++n) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) sums[n][i] = post[n] * values[i];
  }
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    streams[m].to_floats(values);
#pragma unroll
    for (int n = 0; n < kStreams; ++n) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) sums[n][i] += comb[m][n] * values[i];
    }
  }
#pragma unroll
  for (int n = 0; n < kStreams; ++n) {
    Elements rounded;
    rounded.from_floats(sums[n]);
    out[n * row_vecs] = rounded;
  }
}

#ifndef __CUDACC_RTC__

// num_tokens times the vectors of a row are less than 2^31.
template <typename T>
inline cudaError_t launch_mhc_post(MhcPostParams params, bool enable_pdl, cudaStream_t stream) {
  const uint32_t vecs = params.hidden_size / (16 / sizeof(T));
  params.vecs_per_row = FastDivisor(vecs);
  const dim3 grid(ceil_div(params.num_tokens * vecs, kMhcPostThreads));
  return launch_kernel(mhc_post_kernel<T>, grid, dim3(kMhcPostThreads), 0, stream, enable_pdl,
                       params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
