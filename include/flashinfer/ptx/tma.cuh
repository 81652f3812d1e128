// The copy engine of sm_90: copies boxes of a tensor from global to shared memory by a tensor map
// that the host encodes. Elements outside the tensor arrive as zeros.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// `map` is in parameter or global memory. Coordinates are in elements, the contiguous dimension
// first. The bytes of the box count towards the phase of `barrier`.
__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int x,
                                         int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Copies a contiguous stretch of global memory; addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Orders this thread's ordinary accesses of shared memory before later ones by the copy engine or
// the tensor cores (also of other threads, after a barrier).
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flashinfer::ptx
