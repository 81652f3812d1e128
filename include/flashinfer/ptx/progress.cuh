// Counters in global memory by which CTAs of a GPU tell others what they have written.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// Adds 1, and releases this thread's earlier writes; those of other threads of the CTA as well if a
// barrier of the CTA is between them and this.
__device__ __forceinline__ void count_done(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits until a counter is at least `count`, and acquires what was released by then.
__device__ __forceinline__ void wait_done(const uint32_t* counter, uint32_t count) {
  uint32_t done;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(counter) : "memory");
  } while (done < count);
}

}  // namespace flashinfer::ptx
