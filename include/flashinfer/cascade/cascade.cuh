// Merging attention states over disjoint sets of keys (Ye et al., "Cascade Inference", 2024; the
// rescaling is that of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018):
//
//   s = log2(sum_i 2^s_i)        v = sum_i 2^(s_i - s) v_i        all s_i = -inf: v = 0, s = -inf
//
// A thread owns one vector of one head (threadIdx.x within the head, threadIdx.y heads, threadIdx.z
// tokens) and walks over the states in order, several loads at a time: the result repeats bit for
// bit. A state without keys is not used at all, whatever its v holds.
//
// Measurements, also of what lost: docs/tuning/rope_page_merge.md.
#pragma once

#include <flashinfer/cascade/cascade_params.h>
#include <flashinfer/common/head_grid.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

// Threads of a CTA. CTAs of 64 threads that merge two states could not be launched fast enough.
// Accesses stream, except those of two states that are far larger than L2.
inline constexpr int kMergeStatesThreads = 64;
inline constexpr int kMergePairThreads = 128;
// Bytes of two states and their merge.
inline constexpr uint64_t kMergeStreamBytes = uint64_t{128} << 20;

namespace detail {

// Weight of a state: 0 for a state without keys, even if no state has any; NaN for a NaN.
__device__ __forceinline__ float merge_weight(float s, float max) {
  return s == -INFINITY ? 0.f : exp2f(s - max);
}

__device__ __forceinline__ float merged_s(float max, float sum) {
  return sum == 0.f ? -INFINITY : max + log2f(sum);
}

template <int kVecSize>
struct MergedState {
  float max_s = -INFINITY;
  float sum = 0.f;  // sum of 2^(s_i - max_s)
  float v[kVecSize] = {};

  template <typename T, int kCount>
  __device__ __forceinline__ void add(const float (&s)[kCount],
                                      const Vector<T, kVecSize> (&states)[kCount]) {
    float new_max = max_s;
#pragma unroll
    for (int i = 0; i < kCount; ++i) new_max = fmaxf(new_max, s[i]);
    if (sum != 0.f) {  // true for NaN, too
      const float old_weight = exp2f(max_s - new_max);
      sum *= old_weight;
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) v[j] *= old_weight;
    }
    max_s = new_max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (s[i] == -INFINITY) continue;
      const float w = exp2f(s[i] - new_max);
      sum += w;
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) v[j] += w * states[i][j];
    }
  }
};

template <typename T>
__device__ __forceinline__ const T* state_row(const AttentionStates& states, uint32_t token,
                                              uint32_t head) {
  return static_cast<const T*>(states.v) + token * states.v_stride_token +
         head * states.v_stride_head;
}

__device__ __forceinline__ const float* state_s(const AttentionStates& states, uint32_t token,
                                                uint32_t head) {
  return states.s + token * states.s_stride_token + head * states.s_stride_head;
}

template <typename T>
__device__ __forceinline__ T* merged_row(const MergeStatesParams& params, uint32_t token,
                                         uint32_t head) {
  return static_cast<T*>(params.v_out) + token * params.v_out_stride_token +
         head * params.v_out_stride_head;
}

}  // namespace detail

// Merges any number of states.
template <typename T, int kVecSize>
__global__ void __launch_bounds__(kMergeStatesThreads)
    merge_states_kernel(const __grid_constant__ MergeStatesParams params) {
  // Loads in flight per thread; each chunk rescales once.
  constexpr int kChunk = 8;
  const uint32_t token = blockIdx.x * blockDim.z + threadIdx.z;
  const uint32_t head = blockIdx.y * blockDim.y + threadIdx.y;
  const uint32_t num_vecs = params.head_dim / kVecSize;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (token >= params.num_tokens || head >= params.num_heads) return;

  detail::MergedState<kVecSize> merged;
  for (uint32_t vec = threadIdx.x; vec < num_vecs; vec += blockDim.x) {
    merged = {};
    const T* next_v = detail::state_row<T>(params.states, token, head) + vec * kVecSize;
    const float* next_s = detail::state_s(params.states, token, head);
    for (uint32_t first = 0; first < params.num_states; first += kChunk) {
      float s[kChunk];
      Vector<T, kVecSize> v[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        s[i] = -INFINITY;
        if (first + i < params.num_states) {
          v[i].load_streaming(next_v);
          s[i] = *next_s;
          next_v += params.states.v_stride_state;
          next_s += params.states.s_stride_state;
        }
      }
      merged.add(s, v);
    }
    const float inv_sum = merged.sum == 0.f ? 0.f : 1.f / merged.sum;
    float y[kVecSize];
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) y[j] = merged.v[j] * inv_sum;
    Vector<T, kVecSize> out;
    out.from_floats(y);
    out.store_streaming(detail::merged_row<T>(params, token, head) + vec * kVecSize);
  }
  if (threadIdx.x == 0) {
    params.s_out[token * params.s_out_stride_token + head * params.s_out_stride_head] =
        detail::merged_s(merged.max_s, merged.sum);
  }
}

namespace detail {

// Reads, merges and writes a vector of two states, while their s arrive.
template <typename T, int kVecSize>
__device__ __forceinline__ void merge_pair_vector(bool streams, const T* address_a,
                                                  const T* address_b, const float* address_s_a,
                                                  const float* address_s_b, T* address_out,
                                                  float& s_a, float& s_b) {
  Vector<T, kVecSize> a, b, out;
  if (streams) {
    a.load_streaming(address_a);
    b.load_streaming(address_b);
  } else {
    a.load(address_a);
    b.load(address_b);
  }
  s_a = *address_s_a;
  s_b = *address_s_b;
  const float max = fmaxf(s_a, s_b);
  float weight_a = merge_weight(s_a, max), weight_b = merge_weight(s_b, max);
  const float sum = weight_a + weight_b;
  const float inv_sum = sum == 0.f ? 0.f : __fdividef(1.f, sum);
  weight_a *= inv_sum;
  weight_b *= inv_sum;
  float y[kVecSize];
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) {
    const float x_a = s_a == -INFINITY ? 0.f : a[j], x_b = s_b == -INFINITY ? 0.f : b[j];
    y[j] = weight_a * x_a + weight_b * x_b;
  }
  out.from_floats(y);
  if (streams) {
    out.store_streaming(address_out);
  } else {
    out.store(address_out);
  }
}

__device__ __forceinline__ float merged_pair_s(float s_a, float s_b) {
  const float max = fmaxf(s_a, s_b);
  return merged_s(max, merge_weight(s_a, max) + merge_weight(s_b, max));
}

// Whether the mask, if there is one, wants a token merged.
__device__ __forceinline__ bool is_chosen(const MergeStatesParams& params, uint32_t token) {
  return params.mask == nullptr || params.mask[token * params.mask_stride] != 0;
}

}  // namespace detail

// Merges two states; the result may overwrite the first.
template <typename T, int kVecSize>
__global__ void __launch_bounds__(kMergePairThreads)
    merge_pair_kernel(const __grid_constant__ MergeStatesParams params) {
  const uint32_t token = heads_first_token_block() * blockDim.z + threadIdx.z;
  const uint32_t head = blockIdx.x * blockDim.y + threadIdx.y;
  const uint32_t num_vecs = params.head_dim / kVecSize;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const bool is_merged =
      token < params.num_tokens && head < params.num_heads && detail::is_chosen(params, token);

  float s_a = 0.f, s_b = 0.f;
  if (is_merged) {
    const T* row_a = detail::state_row<T>(params.states, token, head);
    const T* row_b = detail::state_row<T>(params.other, token, head);
    for (uint32_t vec = threadIdx.x; vec < num_vecs; vec += blockDim.x) {
      const uint32_t offset = vec * kVecSize;
      detail::merge_pair_vector<T, kVecSize>(
          params.streams, row_a + offset, row_b + offset,
          detail::state_s(params.states, token, head), detail::state_s(params.other, token, head),
          detail::merged_row<T>(params, token, head) + offset, s_a, s_b);
    }
  }
  // In place, the head's other threads must have read its s before it is overwritten.
  if (params.s_out == params.states.s) __syncthreads();
  if (is_merged && threadIdx.x == 0) {
    params.s_out[token * params.s_out_stride_token + head * params.s_out_stride_head] =
        detail::merged_pair_s(s_a, s_b);
  }
}

// Merges two states whose heads follow each other without gaps, so that a thread computes fewer
// addresses before it reads. CTAs have whole heads of one token.
template <typename T, int kVecSize>
__global__ void __launch_bounds__(kMergePairThreads)
    merge_pair_dense_kernel(const __grid_constant__ MergeStatesParams params) {
  const uint32_t token = heads_first_token_block();
  const uint32_t unit = blockIdx.x * kMergePairThreads + threadIdx.x;
  const uint32_t head = params.units_per_head.divide(unit);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const bool is_merged = token < params.num_tokens && detail::is_chosen(params, token);
  float s_a = 0.f, s_b = 0.f;
  if (is_merged) {
    const auto row = [&](const AttentionStates& states) {
      return static_cast<const T*>(states.v) + token * states.v_stride_token + unit * kVecSize;
    };
    const auto s = [&](const AttentionStates& states) {
      return states.s + token * states.s_stride_token + head;
    };
    detail::merge_pair_vector<T, kVecSize>(
        params.streams, row(params.states), row(params.other), s(params.states), s(params.other),
        static_cast<T*>(params.v_out) + token * params.v_out_stride_token + unit * kVecSize, s_a,
        s_b);
  }
  if (params.s_out == params.states.s) __syncthreads();  // as above
  if (is_merged && unit == head * params.units_per_head.divisor) {
    params.s_out[token * params.s_out_stride_token + head] = detail::merged_pair_s(s_a, s_b);
  }
}

#ifndef __CUDACC_RTC__

namespace detail {

inline bool heads_are_dense(const MergeStatesParams& params) {
  const auto are_dense = [&](const AttentionStates& states) {
    return states.v_stride_head == params.head_dim && states.s_stride_head == 1;
  };
  return are_dense(params.states) && are_dense(params.other) &&
         params.v_out_stride_head == params.head_dim && params.s_out_stride_head == 1;
}

}  // namespace detail

// `vectorizable`: head_dim and every row of v are whole, aligned 16-byte vectors. kPair: merges the
// two states in `states` and `other`.
template <typename T, bool kPair>
inline cudaError_t launch_merge_states(MergeStatesParams params, bool vectorizable, bool enable_pdl,
                                       cudaStream_t stream) {
  constexpr int kVecSize = 16 / sizeof(T);
  const uint32_t num_vecs = params.head_dim / (vectorizable ? kVecSize : 1);
  auto kernel = vectorizable ? merge_pair_kernel<T, kVecSize> : merge_pair_kernel<T, 1>;
  uint32_t threads = kMergePairThreads;
  bool is_pair = true;
  if constexpr (!kPair) {
    if (params.num_states == 2) {
      params.other = params.states;
      params.other.v = static_cast<const T*>(params.states.v) + params.states.v_stride_state;
      params.other.s += params.states.s_stride_state;
    } else {
      kernel = vectorizable ? merge_states_kernel<T, kVecSize> : merge_states_kernel<T, 1>;
      threads = kMergeStatesThreads;
      is_pair = false;
    }
  }
  const uint64_t row_bytes = uint64_t{params.num_heads} * params.head_dim * sizeof(T);
  params.streams = 3 * row_bytes * params.num_tokens <= kMergeStreamBytes;
  const uint32_t units = params.num_heads * num_vecs;  // per token
  if (is_pair && vectorizable && kMergePairThreads % num_vecs == 0 &&
      units % kMergePairThreads == 0 && detail::heads_are_dense(params)) {
    params.units_per_head = FastDivisor(num_vecs);
    const HeadGrid tokens = {dim3(params.num_tokens, units / kMergePairThreads),
                             dim3(kMergePairThreads)};
    const HeadGrid dense = heads_first(tokens);
    return launch_kernel(merge_pair_dense_kernel<T, kVecSize>, dense.grid, dense.block, 0, stream,
                         enable_pdl, params);
  }
  HeadGrid shape = make_head_grid(params.num_tokens, params.num_heads, num_vecs, threads);
  if (is_pair) shape = heads_first(shape);
  return launch_kernel(kernel, shape.grid, shape.block, 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
