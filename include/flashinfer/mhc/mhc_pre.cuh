// Pre mapping of hyper-connections with four streams. For each token, with r its streams:
//
//   mix = sum over splits of dot_mix * rsqrt(sum of r^2 / k + rms_eps) * scale + base
//   pre = sigmoid(mix of pre) + pre_eps,  layer_input = sum over m of pre[m] * r[m, :]
//   post_mix = post_mult * sigmoid(mix of post)
//   comb_mix = sinkhorn(softmax of the rows of mix of comb, + sinkhorn_eps)
//
// A CTA has a token. Its first warp mixes while the loads of the others are under way; then these
// write the layer's input, and the first one goes through Sinkhorn's iterations beside them: they
// are a long chain of dependent instructions, which no other warp waits for.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/device_info.h>
#include <flashinfer/common/exp2.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/mhc/mhc_pre_params.h>
#include <flashinfer/mhc/mhc_streams.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

struct MhcPreShared {
  float squares[32];  // of each warp's columns
  float pre[kMhcStreams];
};

// Alternately divides columns and rows of `m` by their sums plus `eps`, columns first: `repeat`
// times columns, in between rows. Only factors of rows and columns are kept, m[i][j] * row[i] *
// column[j]: dividing m[i][j] * row[i] by (its row's sum * row[i] + eps) makes the new factor 1 /
// (row's sum + eps / row[i]), so each step is four short sums and four reciprocals.
__device__ __forceinline__ void mhc_sinkhorn(float (&m)[kMhcStreams][kMhcStreams], uint32_t repeat,
                                             float eps) {
  constexpr int n = kMhcStreams;
  float row[n], column[n], inv_row[n], inv_column[n];
#pragma unroll
  for (int i = 0; i < n; ++i) row[i] = inv_row[i] = inv_column[i] = 1.f;
  for (uint32_t step = 0;; ++step) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      inv_column[j] *= eps;
#pragma unroll
      for (int i = 0; i < n; ++i) inv_column[j] += m[i][j] * row[i];
      column[j] = math::ptx_rcp(inv_column[j]);
    }
    if (step + 1 >= repeat) break;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      inv_row[i] *= eps;
#pragma unroll
      for (int j = 0; j < n; ++j) inv_row[i] += m[i][j] * column[j];
      row[i] = math::ptx_rcp(inv_row[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) m[i][j] *= row[i] * column[j];
  }
}

// The first warp's part: a lane has one of the mixes.
template <bool kPrenorm>
__device__ __forceinline__ void mhc_mix(const MhcPreParams& params, MhcPreShared& shared) {
  constexpr uint32_t kAll = 0xffffffffu;
  const uint32_t lane = threadIdx.x, token = blockIdx.x;
  const uint32_t slot = lane < kMhcMixes ? lane : 0;
  float mix = 0.f, squares = 0.f;
#pragma unroll 4
  for (uint32_t split = 0; split < params.num_splits; ++split) {
    mix += params.dot_mix[(uint64_t{split} * params.num_tokens + token) * kMhcMixes + slot];
  }
  const float scale = params.scale[slot < 4 ? 0 : slot < 8 ? 1 : 2], base = params.base[slot];
  if constexpr (kPrenorm) {
    __syncthreads();
    squares = lane != 0 && lane < blockDim.x / 32 ? shared.squares[lane] : 0.f;
  } else {
    for (uint32_t split = lane; split < params.num_splits; split += 32) {
      squares += params.sqrsum[uint64_t{split} * params.num_tokens + token];
    }
  }
  squares = warp_reduce_sum(squares);
  mix = mix * rsqrtf(squares * params.inv_k + params.rms_eps) * scale + base;

  const float gate = 1.f / (1.f + expf(-mix));
  if (lane < 4) shared.pre[lane] = gate + params.pre_eps;
  __syncthreads();
  if (lane >= 4 && lane < 8) {
    params.post_mix[uint64_t{token} * kMhcStreams + lane - 4] = gate * params.post_mult;
  }

  // Four lanes have a row of comb.
  float largest = fmaxf(mix, __shfl_xor_sync(kAll, mix, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
  float weight = expf(mix - largest);
  weight = weight / warp_reduce_sum(weight, 4) + params.sinkhorn_eps;
  float comb[kMhcStreams][kMhcStreams];
#pragma unroll
  for (int i = 0; i < kMhcStreams; ++i) {
#pragma unroll
    for (int j = 0; j < kMhcStreams; ++j) {
      comb[i][j] = __shfl_sync(kAll, weight, 8 + i * kMhcStreams + j);
    }
  }
  mhc_sinkhorn(comb, params.sinkhorn_repeat, params.sinkhorn_eps);
  if (lane != 0) return;
#pragma unroll
  for (int i = 0; i < kMhcStreams; ++i) {
    Vector<float, kMhcStreams> values;
    values.from_floats(comb[i]);
    values.store(params.comb_mix + (uint64_t{token} * kMhcStreams + i) * kMhcStreams);
  }
}

// The same columns of all streams of a token.
template <typename T>
struct MhcColumns {
  static constexpr int kVecSize = 16 / sizeof(T);
  Vector<T, kVecSize> streams[kMhcStreams];

  __device__ __forceinline__ void load(const T* first, uint32_t hidden_size) {
#pragma unroll
    for (int m = 0; m < kMhcStreams; ++m) streams[m].load(first + m * hidden_size);
  }
  __device__ __forceinline__ float squares() const {
    float sum = 0.f;
#pragma unroll
    for (int m = 0; m < kMhcStreams; ++m) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) sum += streams[m][i] * streams[m][i];
    }
    return sum;
  }
  __device__ __forceinline__ Vector<T, kVecSize> sum(const float (&pre)[kMhcStreams]) const {
    float sums[kVecSize] = {};
#pragma unroll
    for (int m = 0; m < kMhcStreams; ++m) {
      float values[kVecSize];
      streams[m].to_floats(values);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) sums[i] += pre[m] * values[i];
    }
    Vector<T, kVecSize> rounded;
    rounded.from_floats(sums);
    return rounded;
  }
};

// The part of the other warps.
template <typename T, bool kPrenorm>
__device__ __forceinline__ void mhc_sum_streams(const MhcPreParams& params, MhcPreShared& shared) {
  using Columns = MhcColumns<T>;
  const uint32_t step = (blockDim.x - 32) * Columns::kVecSize;
  const uint32_t first = (threadIdx.x - 32) * Columns::kVecSize;
  const uint32_t hidden_size = params.hidden_size;
  const T* residual =
      static_cast<const T*>(params.residual) + uint64_t{blockIdx.x} * kMhcStreams * hidden_size;
  T* out = static_cast<T*>(params.layer_input) + uint64_t{blockIdx.x} * hidden_size;

  Columns columns;
  if (first < hidden_size) columns.load(residual + first, hidden_size);
  if constexpr (kPrenorm) {
    float squares = first < hidden_size ? columns.squares() : 0.f;
    for (uint32_t column = first + step; column < hidden_size; column += step) {
      Columns more;
      more.load(residual + column, hidden_size);
      squares += more.squares();
    }
    squares = warp_reduce_sum(squares);
    if (threadIdx.x % 32 == 0) shared.squares[threadIdx.x / 32] = squares;
    __syncthreads();
  }
  __syncthreads();
  float pre[kMhcStreams];
#pragma unroll
  for (int m = 0; m < kMhcStreams; ++m) pre[m] = shared.pre[m];
  for (uint32_t column = first; column < hidden_size; column += step) {
    if (column != first) columns.load(residual + column, hidden_size);
    columns.sum(pre).store(out + column);
  }
}

template <typename T, bool kPrenorm>
__global__ void __launch_bounds__(1024)
    mhc_pre_kernel(const __grid_constant__ MhcPreParams params) {
  __shared__ MhcPreShared shared;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (threadIdx.x < 32) {
    mhc_mix<kPrenorm>(params, shared);
  } else {
    mhc_sum_streams<T, kPrenorm>(params, shared);
  }
}

#ifndef __CUDACC_RTC__

template <typename T, bool kPrenorm>
inline cudaError_t launch_mhc_pre(const MhcPreParams& params, const DeviceInfo& device,
                                  bool enable_pdl, cudaStream_t stream) {
  uint32_t threads = params.block_size;
  if (threads == 0) {
    // Few tokens leave multiprocessors idle: a CTA then loads all it can at once. With many,
    // several CTAs share a multiprocessor, and one of them loads while another one mixes.
    const uint32_t vecs = params.hidden_size / MhcColumns<T>::kVecSize;
    const uint32_t most = params.num_tokens <= static_cast<uint32_t>(device.num_sms) ? 992 : 256;
    threads = 32 + round_up(ceil_div(vecs, ceil_div(vecs, most)), 32u);
  }
  return launch_kernel(mhc_pre_kernel<T, kPrenorm>, dim3(params.num_tokens), dim3(threads), 0,
                       stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
