// cp.async (sm_80): copies of 16 bytes from global to shared memory that pass by the registers.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes zeros where `valid` is false (`source` is then not read). By way of L2
// only (.cg), in lines of 128 bytes: on an H200, 3 % faster than without for K/V in pages; lines of
// 256 bytes are 1.5 % slower. An evict_first policy gave 1 % more, but ptxas 13.0 makes some such
// copies (shared address + uniform register) into an instruction that the GPU refuses.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, bool valid) {
  // Not a size of 0 in a register: that takes seven instructions, for sizes that nobody asks for.
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.u32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignored;\n"
      "}" ::"r"(shared),
      "l"(source), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

// Copies 4 bytes, by way of L1, or writes a zero where `valid` is false.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Closes the group of this thread's copies since the last one.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's latest groups are unfinished. What it copied is
// then visible to itself; to others after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashinfer::ptx
