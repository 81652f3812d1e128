// Ends a product of one row whose columns are logits of experts: stores them, and chooses those
// with the largest ones, whose weights are a softmax. One cluster has all columns; the first warp
// of its first CTA chooses.
//
// A number of 32 bits orders experts: the rounded logit's, then which one it is. So one maximum
// over the warp finds the next expert with its logit, where moe/route.cuh, which compares scores in
// float, needs two and looks the score up.
//
// The expert with the lower number is the better one of two with equal logits. A logit that is NaN
// is better than all numbers, and the weights become NaN.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/gemm/one_row.cuh>
#include <flashinfer/gemm/one_row_route_params.h>

namespace flashinfer {

template <typename T, int kColumns>
class OneRowRoute {
  static constexpr int kPerLane = kColumns / 32;

 public:
  using Params = OneRowRouteParams;
  static constexpr bool kByFirst = true;
  static constexpr uint32_t kMostSplits = 16;
  static constexpr uint32_t kSharedBytes = 0;

  __device__ __forceinline__ static void prepare(const Params&, uint32_t, char*) {}

  __device__ __forceinline__ static void finish(const Params& params, uint32_t, uint32_t,
                                                const float* received, uint32_t splits, char*) {
    if (threadIdx.x >= 32) return;
    float logits[kPerLane] = {};
    for (uint32_t s = 0; s < splits; ++s) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        logits[i] += received[s * kColumns + threadIdx.x + 32 * i];
      }
    }
    uint32_t keys[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t c = threadIdx.x + 32 * i;
      keys[i] = 0;
      if (c >= params.n) continue;
      if (params.bias != nullptr) logits[i] += to_float(static_cast<const T*>(params.bias)[c]);
      const T rounded = from_float<T>(logits[i]);
      static_cast<T*>(params.out)[c] = rounded;
      keys[i] = key_of(rounded, c);
      logits[i] = to_float(rounded);
    }
    choose(params, logits, keys);
  }

 private:
  // Not 0: there are fewer experts than 16 bits tell apart.
  __device__ __forceinline__ static uint32_t key_of(T logit, uint32_t expert) {
    const float x = to_float(logit);
    uint32_t order = logit.bits;
    if (x == 0.f) order = 0;  // of either sign
    order = order & 0x8000u ? ~order & 0xffffu : order | 0x8000u;
    if (x != x) order = 0xffffu;
    return order << 16 | (0xffffu - expert);
  }

  __device__ __forceinline__ static float logit_of(uint32_t key) {
    const uint32_t order = key >> 16;
    return to_float(T{static_cast<uint16_t>(order & 0x8000u ? order & 0x7fffu : ~order)});
  }

  // Lane j has the expert number j in the end.
  __device__ __forceinline__ static void choose(const Params& params,
                                                const float (&logits)[kPerLane],
                                                uint32_t (&keys)[kPerLane]) {
    uint32_t own = 0, first = 0;
    for (uint32_t j = 0; j < params.top_k; ++j) {
      uint32_t best = keys[0];
#pragma unroll
      for (int i = 1; i < kPerLane; ++i) best = max(best, keys[i]);
      best = __reduce_max_sync(0xffffffffu, best);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (keys[i] == best) keys[i] = 0;
      }
      if (j == 0) first = best;
      if (threadIdx.x == j) own = best;
    }
    const float largest = logit_of(first);
    const bool is_chosen = threadIdx.x < params.top_k;
    const float weight = is_chosen ? expf(logit_of(own) - largest) : 0.f;
    float sum = weight;
    if (!params.renormalize) {
      sum = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (threadIdx.x + 32 * i < params.n) sum += expf(logits[i] - largest);
      }
    }
    sum = warp_reduce_sum(sum);
    if (!is_chosen) return;
    params.weights[threadIdx.x] = weight * params.scale / sum;
    params.experts[threadIdx.x] = static_cast<int32_t>(0xffffu - (own & 0xffffu));
  }
};

#ifndef __CUDACC_RTC__

// At most kColumns experts, of which 1 to 32 are chosen.
template <typename T, int kColumns>
inline cudaError_t launch_one_row_route(const OneRowRouteParams& params, uint32_t splits,
                                        bool enable_pdl, cudaStream_t stream) {
  if (params.n > kColumns) return cudaErrorInvalidValue;
  using Traits = OneRowTraits<T, kColumns, true, OneRowRoute<T, kColumns>>;
  return launch_one_row<Traits>(params, splits, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
