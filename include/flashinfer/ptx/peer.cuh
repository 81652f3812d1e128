// Memory that several GPUs access: loads and stores that other devices see, the clock that all
// devices share, and the end of a program that must not go on.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

__device__ __forceinline__ void store_peer(void* address, uint4 data) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(data.x),
               "r"(data.y), "r"(data.z), "r"(data.w)
               : "memory");
}

__device__ __forceinline__ void store_peer(void* address, uint32_t data) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(data) : "memory");
}

__device__ __forceinline__ uint4 load_peer_16(const void* address) {
  uint4 data;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "l"(address)
               : "memory");
  return data;
}

__device__ __forceinline__ uint32_t load_peer_4(const void* address) {
  uint32_t data;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(data) : "l"(address) : "memory");
  return data;
}

// Stores a flag after everything that this thread wrote, or learnt of by a barrier.
__device__ __forceinline__ void release_flag(void* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Loads a flag before everything that this thread reads later.
__device__ __forceinline__ uint32_t acquire_flag(const void* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Between two polls of another device's data.
__device__ __forceinline__ void poll_again() {}

}  // namespace flashinfer::ptx
