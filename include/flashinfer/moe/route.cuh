// The experts of each token from its router's logits, one warp a token: scores, the best groups of
// experts if there are groups, the best experts of these, and their weights.
//
// The expert with the lower number is the better one of two with equal scores. A logit that is NaN
// is better than all numbers, and the token's weights become NaN: they do not look like a result.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/moe/moe_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

inline constexpr uint32_t kMoeRouteWarps = 4;  // of a CTA

namespace detail {

// Numbers whose order is that of floats; NaN comes after infinity.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (x != x) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t number) {
  return __uint_as_float(number & 0x80000000u ? number & 0x7fffffffu : ~number);
}

// The largest value in a warp and where it stands; of equal ones the lowest number.
struct MoeBest {
  uint32_t value, index;

  __device__ __forceinline__ void take(uint32_t other_value, uint32_t other_index) {
    if (other_value > value || (other_value == value && other_index < index)) {
      value = other_value;
      index = other_index;
    }
  }

  __device__ __forceinline__ void reduce() {
#if __CUDA_ARCH__ >= 800
    const uint32_t largest = __reduce_max_sync(0xffffffffu, value);
    index = __reduce_min_sync(0xffffffffu, value == largest ? index : 0xffffffffu);
    value = largest;
#else
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const uint32_t other_value = __shfl_xor_sync(0xffffffffu, value, distance);
      const uint32_t other_index = __shfl_xor_sync(0xffffffffu, index, distance);
      take(other_value, other_index);
    }
#endif
  }
};

__device__ __forceinline__ float warp_reduce_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = x != x || x > other ? x : other;
  }
  return x;
}

}  // namespace detail

// kPerLane: experts of a lane. Lane l has experts l, l + 32, ...
template <typename T, MoeScore kScore, int kPerLane>
class MoeRouter {
  static constexpr uint32_t kNone = 0;  // less than every number's `ordered`

 public:
  // `scores`: room for a number per expert, of this warp.
  __device__ __forceinline__ MoeRouter(const MoeRouteParams& params, float* scores)
      : params_(params), scores_(scores), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void route(uint32_t token) {
    load(static_cast<const T*>(params_.logits) + token * params_.logits_stride);
    if (params_.num_groups > 1) keep_best_groups();
    choose(static_cast<uint64_t>(token) * params_.top_k);
  }

 private:
  __device__ __forceinline__ bool exists(int i) const {
    return lane_ + 32u * i < params_.num_experts;
  }

  // Scores, and what experts are compared by.
  __device__ __forceinline__ void load(const T* logits) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score_[i] = exists(i) ? to_float(logits[lane_ + 32 * i]) : -INFINITY;
    }
    if constexpr (kScore == MoeScore::softmax) {
      softmax();
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) score_[i] = 1.f / (1.f + expf(-score_[i]));
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!exists(i)) {
        key_[i] = kNone;
        continue;
      }
      const float compared =
          params_.bias != nullptr ? score_[i] + params_.bias[lane_ + 32 * i] : score_[i];
      key_[i] = detail::ordered(compared);
      if (params_.num_groups > 1) scores_[lane_ + 32 * i] = compared;
    }
  }

  __device__ __forceinline__ void softmax() {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      largest = score_[i] != score_[i] || score_[i] > largest ? score_[i] : largest;
    }
    largest = detail::warp_reduce_max(largest);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score_[i] = exists(i) ? expf(score_[i] - largest) : 0.f;
      sum += score_[i];
    }
    sum = warp_reduce_sum(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score_[i] /= sum;
  }

  // Experts of other groups than the best ones can no longer be chosen. Neighbouring lanes weigh a
  // group.
  __device__ __forceinline__ void keep_best_groups() {
    const uint32_t size = params_.num_experts / params_.num_groups;
    uint32_t lanes = 32;
    while (lanes * params_.num_groups > 32) lanes /= 2;
    const uint32_t own = lane_ / lanes;
    uint32_t best = detail::ordered(-INFINITY), second = best, key = kNone;
    __syncwarp();
    if (own < params_.num_groups) {
      for (uint32_t i = lane_ % lanes; i < size; i += lanes) {
        const uint32_t score = detail::ordered(scores_[own * size + i]);
        second = max(second, min(best, score));
        best = max(best, score);
      }
    }
    for (uint32_t distance = lanes / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, best, distance);
      const uint32_t after = __shfl_xor_sync(0xffffffffu, second, distance);
      second = max(max(second, after), min(best, other));
      best = max(best, other);
    }
    if (own < params_.num_groups) {
      const float sum = detail::unordered(best) + detail::unordered(second);
      key = size > 1 ? detail::ordered(sum) : best;
    }
    uint32_t kept = 0;
    for (uint32_t n = 0; n < params_.top_groups; ++n) {
      detail::MoeBest found = {kept >> (own % 32) & 1 ? kNone : key, own};
      found.reduce();
      kept |= 1u << found.index;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t group = (lane_ + 32 * i) / size;
      if (exists(i) && !(kept >> group & 1)) key_[i] = kNone;
    }
    __syncwarp();  // the next token's scores overwrite these
  }

  // The best experts, one after the other. Lane j writes number j.
  __device__ __forceinline__ void choose(uint64_t entry) {
    float weight = 0.f;
    uint32_t expert = 0;
    for (uint32_t j = 0; j < params_.top_k; ++j) {
      detail::MoeBest best = {kNone, 0xffffffffu};
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) best.take(key_[i], lane_ + 32 * i);
      best.reduce();
      float score = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (best.index == lane_ + 32 * i) {
          key_[i] = kNone;
          score = score_[i];
        }
      }
      score = __shfl_sync(0xffffffffu, score, best.index % 32);
      if (lane_ == j) {
        weight = score;
        expert = best.index;
      }
    }
    float factor = params_.scale;
    if (params_.renormalize) factor /= warp_reduce_sum(weight) + 1e-20f;
    if (lane_ < params_.top_k) {
      params_.weights[entry + lane_] = weight * factor;
      params_.experts[entry + lane_] = static_cast<int32_t>(expert);
    }
  }

  const MoeRouteParams& params_;
  float* const scores_;
  const uint32_t lane_;
  float score_[kPerLane];
  uint32_t key_[kPerLane];
};

template <typename T, MoeScore kScore, int kPerLane>
__global__ void __launch_bounds__(32 * kMoeRouteWarps)
    moe_route_kernel(const __grid_constant__ MoeRouteParams params) {
  __shared__ float scores[kMoeRouteWarps][32 * kPerLane];
  const uint32_t warp = threadIdx.x / 32, token = blockIdx.x * kMoeRouteWarps + warp;
  ptx::grid_launch_and_wait();
  if (token >= params.num_tokens) return;
  MoeRouter<T, kScore, kPerLane>(params, scores[warp]).route(token);
}

#ifndef __CUDACC_RTC__

// At most 32 * kPerLane experts, kMoeMaxChoices choices and kMoeMaxGroups groups.
template <typename T, MoeScore kScore, int kPerLane>
inline cudaError_t launch_moe_route(const MoeRouteParams& params, bool enable_pdl,
                                    cudaStream_t stream) {
  return launch_kernel(moe_route_kernel<T, kScore, kPerLane>,
                       dim3(ceil_div(params.num_tokens, kMoeRouteWarps)), dim3(32 * kMoeRouteWarps),
                       0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
