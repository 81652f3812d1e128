// Ends a query row after all of its KV: adds the sink, and gives the output's factor and the LSE.
#pragma once

#include <flashinfer/common/exp2.cuh>
#include <flashinfer/mla/mla_params.h>

namespace flashinfer {

// Where a row of a request's packed rows stands.
struct MlaRowPlace {
  int64_t token, head;

  __device__ __forceinline__ MlaRowPlace(const MlaParams& params, int qo_begin,
                                         uint32_t packed_row) {
    const uint32_t in_request = params.num_heads.divide(packed_row);
    token = qo_begin + int64_t{in_request};
    head = packed_row - in_request * params.num_heads.divisor;
  }

  // Its output.
  template <typename O>
  __device__ __forceinline__ O* row(const MlaParams& params) const {
    return static_cast<O*>(params.o.data) + token * params.o.stride_token +
           head * params.o.stride_head;
  }
};

struct MlaRowEnd : MlaRowPlace {
  float factor;  // of the row's sum of weighted values
  float lse;     // base 2

  // The weights are relative to 2^largest, and their sum is `sum`.
  __device__ __forceinline__ MlaRowEnd(const MlaParams& params, int qo_begin, uint32_t packed_row,
                                       float largest, float sum)
      : MlaRowPlace(params, qo_begin, packed_row) {
    float scale = 1.f;
    if (params.sinks != nullptr) {
      const float sink = params.sinks[head] * math::log2e;
      const float both = fmaxf(largest, sink);
      if (both != -math::inf) {
        scale = math::ptx_exp2(largest - both);
        sum = fmaf(sum, scale, math::ptx_exp2(sink - both));
        largest = both;
      }
    }
    // The result of a row that sees no key is 0, not 0 / 0; NaN stays NaN.
    factor = sum == 0.f ? 0.f : scale * params.o_scale / sum;
    lse = sum == 0.f ? -math::inf : largest + math::ptx_log2(sum);
  }

  __device__ __forceinline__ void write_lse(const MlaParams& params) const {
    if (params.lse == nullptr) return;
    params.lse[token * params.num_heads.divisor + head] = lse * params.lse_factor;
  }
};

}  // namespace flashinfer
