// Counters in global memory by which CTAs of a GPU tell others what they have written.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// Adds 1, and releases this thread's earlier writes; those of other threads of the CTA as well if a
// barrier of the CTA is between them and this.
__device__ __forceinline__ void count_done(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Returns a counter, and acquires what was released by then.
__device__ __forceinline__ uint32_t see_count(const uint32_t* counter) {
  uint32_t count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// Waits until a counter is at least `count`, and acquires what was released by then.
__device__ __forceinline__ void wait_done(const uint32_t* counter, uint32_t count) {
  while (see_count(counter) < count) {
  }
}

// Releases, as count_done() does, to whoever sees what this thread adds to counters afterwards.
__device__ __forceinline__ void release() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Adds to a counter and returns what it was: acquires what those released who added before.
__device__ __forceinline__ uint32_t count_and_see(uint32_t* counter, uint32_t amount) {
  uint32_t before;
  asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(amount)
               : "memory");
  return before;
}

// A counter of events alone, which says nothing about memory.
__device__ __forceinline__ void count_event(uint32_t* counter) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Adds to it and returns what it was.
__device__ __forceinline__ uint32_t count_events(uint32_t* counter, uint32_t amount) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(amount)
               : "memory");
  return before;
}

__device__ __forceinline__ uint32_t see_events(const uint32_t* counter) {
  uint32_t count;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

}  // namespace flashinfer::ptx
