// How much shared memory a CTA may have. Plain C++.
#pragma once

#include <flashinfer/common/math.cuh>

namespace flashinfer {

// Shared memory a CTA may have on compute capability `cc` (90 for 9.0).
FLASHINFER_HOST_DEVICE constexpr int max_shared_bytes(int cc) {
  return cc == 86 || cc == 89 || cc >= 120 ? 99 << 10 : cc < 90 ? 163 << 10 : 227 << 10;
}

}  // namespace flashinfer
