// Division by a number known at launch: one multiplication and one shift, where the GPU would need
// some twenty instructions. Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994.
#pragma once

#include <cstdint>
#include <flashinfer/common/math.cuh>

namespace flashinfer {

struct FastDivisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  FastDivisor() = default;

  // `d` from 1 to 2^31.
  explicit FastDivisor(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  // Returns n / divisor; `n` must be below 2^31, so that the sum does not overflow.
  FLASHINFER_HOST_DEVICE uint32_t divide(uint32_t n) const {
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32);
    return (high + n) >> shift;
  }
};

}  // namespace flashinfer
