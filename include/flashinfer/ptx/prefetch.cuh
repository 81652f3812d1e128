// prefetch.global.L2 (sm_80 here; PTX has it from sm_20): brings one line into L2. L2 is the point
// of coherence between grids, so a prefetch may precede grid_dependency_wait even for data an
// earlier grid is still writing.
#pragma once

namespace flashinfer::ptx {

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Prefetches a stretch of memory into L2 (cp.async.bulk.prefetch.L2, sm_90; does nothing on older
// architectures). Address and size must be multiples of 16.
__device__ __forceinline__ void prefetch_bulk_l2(const void* address, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

}  // namespace flashinfer::ptx
