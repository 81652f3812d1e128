// cp.async (sm_80): copies of 16 bytes from global to shared memory that bypass the registers.
//
// Measurements, also of what lost: docs/tuning/memory.md.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes zeros if `valid` is false (`source` is then not read). The copy uses
// L2 only (.cg), in lines of 128 bytes. It has no evict_first policy, because ptxas 13.0 turns some
// such copies (shared address + uniform register) into an instruction that the GPU refuses.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, bool valid) {
  // A size of 0 in a register would take seven instructions instead.
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.u32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignored;\n"
      "}" ::"r"(shared),
      "l"(source), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

// Copies 8 bytes through L1, or writes zeros if `valid` is false (`source` is then not read).
__device__ __forceinline__ void cp_async_8(uint32_t shared, const void* source, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.u32 ignored, %2, 0;\n"
      "cp.async.ca.shared.global [%0], [%1], 8, ignored;\n"
      "}" ::"r"(shared),
      "l"(source), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

// Copies 4 bytes through L1, or writes zero if `valid` is false.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Closes the group of this thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's latest groups are unfinished. The finished copies
// are then visible to this thread, and to others after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashinfer::ptx
