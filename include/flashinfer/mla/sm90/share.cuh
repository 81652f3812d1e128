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

  // The same in one trip where each CTA has one item, whose number is then the CTA's: it is read
  // beside the range, not after it. The list has room for an item of each CTA.
  __device__ __forceinline__ static MlaShare guess(const MlaParams& params) {
    MlaShare share;
    share.begin = params.cta_begin[blockIdx.x];
    share.end = params.cta_begin[blockIdx.x + 1];
    share.first = params.items[blockIdx.x];
    const bool has_items = share.begin < share.end;
    if (has_items && share.begin != static_cast<int>(blockIdx.x)) {
      share.first = params.items[share.begin];
    }
    // No branch, which the compiler would let the first load wait for.
    const int mask = has_items ? -1 : 0;
    share.first.kv_begin &= mask;
    share.first.kv_end &= mask;
    return share;
  }

 private:
  MlaShare() = default;
};

}  // namespace flashinfer
