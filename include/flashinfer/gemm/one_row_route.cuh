// Ends a product of one row whose columns are logits of experts: stores them and chooses experts, as
// moe/route.cuh does. One cluster has all columns; the first warp of its first CTA chooses.
#pragma once

#include <flashinfer/gemm/one_row.cuh>
#include <flashinfer/gemm/one_row_route_params.h>
#include <flashinfer/moe/route.cuh>

namespace flashinfer {

template <typename T, MoeScore kScore, int kColumns>
struct OneRowRoute {
  using Params = OneRowRouteParams;
  static constexpr bool kByFirst = true;
  static constexpr int kPerLane = kColumns / 32;
  static constexpr uint32_t kSharedBytes = kColumns * (sizeof(float) + sizeof(T));

  __device__ __forceinline__ static void prepare(const Params&, uint32_t, char*) {}

  __device__ __forceinline__ static void finish(const Params& params, uint32_t, uint32_t,
                                                const float* received, uint32_t splits,
                                                char* shared) {
    if (threadIdx.x >= 32) return;
    float* const scores = reinterpret_cast<float*>(shared);
    T* const logits = reinterpret_cast<T*>(scores + kColumns);
    float y[kPerLane] = {};
    for (uint32_t s = 0; s < splits; ++s) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) y[i] += received[s * kColumns + threadIdx.x + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t c = threadIdx.x + 32 * i;
      if (c >= params.n) continue;
      if (params.bias != nullptr) y[i] += to_float(static_cast<const T*>(params.bias)[c]);
      static_cast<T*>(params.out)[c] = logits[c] = from_float<T>(y[i]);
    }
    MoeRouteParams route = params.route;
    route.logits = logits;
    MoeRouter<T, kScore, kPerLane>(route, scores).route(0);
  }
};

#ifndef __CUDACC_RTC__

// At most kColumns experts, and choices as launch_moe_route() takes them.
template <typename T, MoeScore kScore, int kColumns>
inline cudaError_t launch_one_row_route(OneRowRouteParams params, uint32_t splits, bool enable_pdl,
                                        cudaStream_t stream) {
  if (params.n > kColumns) return cudaErrorInvalidValue;
  using Traits = OneRowTraits<T, kColumns, true, OneRowRoute<T, kScore, kColumns>>;
  return launch_one_row<Traits>(params, splits, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
