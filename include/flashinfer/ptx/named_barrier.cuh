// Barriers among some of a CTA's warps.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// Barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads in whole warps, counting those
// that wait and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Like named_barrier_sync; returns whether `predicate` holds in all threads.
__device__ __forceinline__ bool named_barrier_all(int id, int threads, bool predicate) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "barrier.cta.red.and.pred.aligned all, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(predicate))
      : "memory");
  return all != 0;
}

}  // namespace flashinfer::ptx
