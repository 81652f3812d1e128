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

}  // namespace flashinfer::ptx
