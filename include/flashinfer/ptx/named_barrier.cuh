// Barriers among some of a CTA's warps.
#pragma once

namespace flashinfer::ptx {

// Barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads in whole warps, counting those
// that wait and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same wait; returns whether `said` is true for any of the threads.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool said) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred said, any;\n"
      "setp.ne.u32 said, %3, 0;\n"
      "barrier.cta.red.or.pred.aligned any, %1, %2, said;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(said))
      : "memory");
  return any != 0;
}

}  // namespace flashinfer::ptx
