// Loops over fragments in registers that are not unrolled: each turn works on the first fragments,
// which then move to the end. Rare paths use them, since what ptxas makes of their unrolled form
// costs the usual path registers.
#pragma once

#include <type_traits>

namespace flashinfer {

// Moves the first `kBy` of `kCount` fragments of four registers to the end. `fragment(j)` is an
// array of four.
template <int kBy, int kCount, typename Fragment>
__device__ __forceinline__ void rotate_fragments(const Fragment& fragment) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    std::decay_t<decltype(fragment(0)[0])> first[kBy];
#pragma unroll
    for (int j = 0; j < kBy; ++j) first[j] = fragment(j)[e];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int from = j + kBy;
      fragment(j)[e] = from < kCount ? fragment(from % kCount)[e] : first[from % kCount % kBy];
    }
  }
}

}  // namespace flashinfer
