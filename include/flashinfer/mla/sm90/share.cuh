// The work of a CTA: its range of the plan's items, and the first of them.
#pragma once

#include <flashinfer/mla/mla_params.h>

namespace flashinfer {

struct MlaShare {
  int begin, end;
  MlaWorkItem first;  // without tokens if there is none

  __device__ __forceinline__ explicit MlaShare(const MlaParams& params)
      : begin(params.cta_begin[blockIdx.x]), end(params.cta_begin[blockIdx.x + 1]), first() {
    if (begin < end) first = params.items[begin];
  }
};

}  // namespace flashinfer
