// Experts by a table of token ids, and their weights from the router's logits: one warp a token.
//
// The score of an expert is sqrt(softplus(logit)); a token's weights sum to 1. An id or expert that
// does not exist gives expert -1 with weight 0.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/moe/moe_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

inline constexpr uint32_t kMoeHashWarps = 4;  // of a CTA

// T: type of the logits. Id: type of the tokens' ids. Expert: type of the table.
template <typename T, typename Id, typename Expert>
__global__ void __launch_bounds__(32 * kMoeHashWarps)
    moe_hash_kernel(const __grid_constant__ MoeHashParams params) {
  const uint32_t lane = threadIdx.x % 32, token = blockIdx.x * kMoeHashWarps + threadIdx.x / 32;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (token >= params.num_tokens) return;
  const int64_t id = static_cast<const Id*>(params.ids)[token];
  float score = 0.f;
  int64_t expert = -1;
  if (lane < params.top_k && id >= 0 && id < params.num_ids) {
    expert = static_cast<const Expert*>(params.table)[id * params.top_k + lane];
    if (expert < 0 || expert >= params.num_experts) expert = -1;
  }
  if (expert >= 0) {
    const float x =
        to_float(static_cast<const T*>(params.logits)[token * params.logits_stride + expert]);
    // log(1 + exp(x)) without overflow; NaN stays NaN.
    score = sqrtf((x > 0.f ? x : 0.f) + log1pf(expf(-fabsf(x))));
    if (x != x) score = x;
  }
  const float sum = warp_reduce_sum(score);
  if (lane < params.top_k) {
    const uint64_t entry = static_cast<uint64_t>(token) * params.top_k + lane;
    params.weights[entry] = expert >= 0 ? score / (sum + 1e-20f) : 0.f;
    params.experts[entry] = static_cast<int32_t>(expert);
  }
}

#ifndef __CUDACC_RTC__

// At most kMoeMaxChoices choices.
template <typename T, typename Id, typename Expert>
inline cudaError_t launch_moe_hash(const MoeHashParams& params, bool enable_pdl,
                                   cudaStream_t stream) {
  return launch_kernel(moe_hash_kernel<T, Id, Expert>,
                       dim3(ceil_div(params.num_tokens, kMoeHashWarps)), dim3(32 * kMoeHashWarps),
                       0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
