// 16-byte loads of global memory that keep their program order, so that they need no more registers
// than the program says. Nothing writes the memory while the kernel runs.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

__device__ __forceinline__ uint4 load_global_16(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

}  // namespace flashinfer::ptx
