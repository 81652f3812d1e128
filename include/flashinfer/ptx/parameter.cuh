// Reads an element of a kernel parameter, which each lane chooses.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// `element` lies in a `__grid_constant__` parameter. The compiler would read it from the constant
// bank, which serves one address at a time, so 32 lanes with an address each 32 times; a load from
// a generic address (cvta.param, sm_70) goes by way of L1.
__device__ __forceinline__ uint64_t load_parameter(const uint64_t* element) {
  uint64_t value;
  asm("ld.b64 %0, [%1];" : "=l"(value) : "l"(element));
  return value;
}

}  // namespace flashinfer::ptx
