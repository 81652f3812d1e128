// Stores that set how long their lines stay in L2 (createpolicy and st with .L2::cache_hint,
// sm_80).
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// With `keeps`, lines are evicted after those of other policies, otherwise in the usual order.
__device__ __forceinline__ uint64_t l2_policy(bool keeps) {
  uint64_t last, normal;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return keeps ? last : normal;
}

// Stores 16 bytes at a 16-byte address.
__device__ __forceinline__ void store_16(void* address, const uint4& x, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "l"(policy)
               : "memory");
}

}  // namespace flashinfer::ptx
