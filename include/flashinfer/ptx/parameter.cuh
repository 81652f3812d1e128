// Reads an element of a kernel parameter at an index that differs between lanes.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// `element` lies in a `__grid_constant__` parameter. The compiler would read it from the constant
// bank, which serves one address at a time, 32 times for 32 different addresses. A load from a
// generic address (cvta.param, sm_70) goes through L1 instead.
__device__ __forceinline__ uint64_t load_parameter(const uint64_t* element) {
  uint64_t value;
  asm("ld.b64 %0, [%1];" : "=l"(value) : "l"(element));
  return value;
}

}  // namespace flashinfer::ptx
