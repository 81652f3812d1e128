// Merging attention states over disjoint sets of keys (Ye et al., "Cascade Inference", 2024; the
// rescaling is that of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018):
//
//   s = log2(sum_i 2^s_i)        v = sum_i 2^(s_i - s) v_i        all s_i = -inf: v = 0, s = -inf
//
// A thread owns one vector of one head (threadIdx.x within the head, threadIdx.y heads, threadIdx.z
// tokens) and walks over the states in order, several loads at a time: the result repeats bit for
// bit. A state without keys is not used at all, whatever its v holds.
#pragma once

#include <flashinfer/cascade/cascade_params.h>
#include <flashinfer/common/head_grid.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

namespace detail {

template <int kVecSize>
struct MergedState {
  float max_s = -INFINITY;
  float sum = 0.f;  // of 2^(s_i - max_s)
  float v[kVecSize] = {};

  template <typename T, int kCount>
  __device__ __forceinline__ void add(const float (&s)[kCount],
                                      const Vector<T, kVecSize> (&states)[kCount]) {
    float new_max = max_s;
#pragma unroll
    for (int i = 0; i < kCount; ++i) new_max = fmaxf(new_max, s[i]);
    const float old_weight = weight(max_s, new_max);
    sum *= old_weight;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) v[j] *= old_weight;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float w = weight(s[i], new_max);
      sum += w;
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        if (s[i] != -INFINITY) v[j] += w * states[i][j];
      }
    }
    max_s = new_max;
  }

  // 0 for a state without keys even if no state has any; NaN for a NaN.
  __device__ __forceinline__ static float weight(float s, float max) {
    return s == -INFINITY ? 0.f : exp2f(s - max);
  }
};

}  // namespace detail

// Block (vectors of a head, heads, tokens).
template <typename T, int kVecSize, bool kPair>
__global__ void __launch_bounds__(512)
    merge_states_kernel(const __grid_constant__ MergeStatesParams params) {
  // Loads in flight per thread. A chunk is one rescaling, so longer ones also cost less arithmetic.
  constexpr int kChunk = kPair ? 2 : 4;
  using Vec = Vector<T, kVecSize>;
  const uint32_t token = blockIdx.x * blockDim.z + threadIdx.z;
  const uint32_t head = blockIdx.y * blockDim.y + threadIdx.y;
  const uint32_t num_vecs = params.head_dim / kVecSize;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const bool is_merged = token < params.num_tokens && head < params.num_heads &&
                         (params.mask == nullptr || params.mask[token] != 0);

  float s_out = -INFINITY;
  for (uint32_t vec = threadIdx.x; is_merged && vec < num_vecs; vec += blockDim.x) {
    const auto load = [&](const AttentionStates& states, uint32_t state, float& s, Vec& v) {
      s = states.s[token * states.s_stride_token + state * states.s_stride_state +
                   head * states.s_stride_head];
      v.load(static_cast<const T*>(states.v) + token * states.v_stride_token +
             state * states.v_stride_state + head * states.v_stride_head + vec * kVecSize);
    };
    detail::MergedState<kVecSize> merged;
    float s[kChunk];
    Vec v[kChunk];
    if constexpr (kPair) {
      load(params.states, 0, s[0], v[0]);
      load(params.other, 0, s[1], v[1]);
      merged.add(s, v);
    } else {
      for (uint32_t first = 0; first < params.num_states; first += kChunk) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          s[i] = -INFINITY;
          if (first + i < params.num_states) load(params.states, first + i, s[i], v[i]);
        }
        merged.add(s, v);
      }
    }

    const bool is_empty = merged.sum == 0.f;
    const float inv_sum = is_empty ? 0.f : 1.f / merged.sum;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) merged.v[j] *= inv_sum;
    Vec out;
    out.from_floats(merged.v);
    out.store(static_cast<T*>(params.v_out) + token * params.v_out_stride_token +
              head * params.v_out_stride_head + vec * kVecSize);
    if (!is_empty) s_out = merged.max_s + log2f(merged.sum);
  }
  // In place, the head's other threads must have read its s before it is overwritten.
  if constexpr (kPair) __syncthreads();
  if (is_merged && threadIdx.x == 0) {
    params.s_out[token * params.s_out_stride_token + head * params.s_out_stride_head] = s_out;
  }
}

#ifndef __CUDACC_RTC__

// `vectorizable`: head_dim and every row of v are whole, aligned 16-byte vectors.
template <typename T, bool kPair>
inline cudaError_t launch_merge_states(const MergeStatesParams& params, bool vectorizable,
                                       bool enable_pdl, cudaStream_t stream) {
  constexpr int kVecSize = 16 / sizeof(T);
  constexpr uint32_t kThreads = 256;
  const uint32_t num_vecs = params.head_dim / (vectorizable ? kVecSize : 1);
  const HeadGrid shape = make_head_grid(params.num_tokens, params.num_heads, num_vecs, kThreads);
  const auto kernel =
      vectorizable ? merge_states_kernel<T, kVecSize, kPair> : merge_states_kernel<T, 1, kPair>;
  return launch_kernel(kernel, shape.grid, shape.block, 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
