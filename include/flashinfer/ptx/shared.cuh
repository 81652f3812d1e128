// Accesses of shared memory by address, which keep their program order.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

__device__ __forceinline__ uint4 load_shared_16(uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t shared) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(shared)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_shared_1(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

}  // namespace flashinfer::ptx
