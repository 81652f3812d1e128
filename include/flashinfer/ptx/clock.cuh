// The GPU's clock.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

__device__ __forceinline__ uint64_t global_time_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

}  // namespace flashinfer::ptx
