// The work of a CTA: its range of the plan's items, and the first of them.
#pragma once

#include <flashinfer/mla/mla_params.h>

namespace flashinfer {

struct MlaShare {
  int begin, end;
  MlaWorkItem first;  // without tokens if there is none

  // Where each CTA has one item, the first has the CTA's number: it is read beside the range, not
  // after it. The list has room for an item of each CTA.
  __device__ __forceinline__ explicit MlaShare(const MlaParams& params)
      : begin(params.cta_begin[blockIdx.x]),
        end(params.cta_begin[blockIdx.x + 1]),
        first(params.items[blockIdx.x]) {
    if (begin < end && begin != static_cast<int>(blockIdx.x)) first = params.items[begin];
    // No branch, which the compiler would let the first load wait for.
    const int mask = begin < end ? -1 : 0;
    first.kv_begin &= mask;
    first.kv_end &= mask;
  }
};

}  // namespace flashinfer
