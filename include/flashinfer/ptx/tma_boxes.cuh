// More boxes of the copy engine of sm_90 (tma.cuh): boxes of five dimensions, and stores to global
// memory.
#pragma once

#include <flashinfer/ptx/tma.cuh>

namespace flashinfer::ptx {

__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int x,
                                         int y, int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

// Stores a box from shared memory; elements outside the tensor are not written. A thread's stores
// up to its tma_store_commit() form one group.
__device__ __forceinline__ void tma_store(const void* map, uint32_t shared, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(shared), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_store(const void* map, uint32_t shared, int x, int y, int z,
                                          int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the latest `kPending` of this thread's groups have read shared memory.
template <int kPending = 0>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashinfer::ptx
