// More copies by the copy engine of sm_90 (tma.cuh): with a policy for L2, and into the shared
// memory of several CTAs of a cluster.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// Policy for data that is read once: its lines leave L2 first.
__device__ __forceinline__ uint64_t l2_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t l2_evict_normal() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// True in one lane of a fully active warp (elect.sync, sm_90). The compiler then knows that one
// thread continues, and puts the operands of a copy into uniform registers without a loop.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// tma_load() of three dimensions with a policy for L2.
__device__ __forceinline__ void tma_load_hinted(uint32_t shared, const void* map, uint32_t barrier,
                                                int x, int y, int z, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

// Loads a box into every CTA of the cluster whose bit is set in `ctas`, at the same offset in each
// one's shared memory. The bytes count towards the barrier at the same offset in each CTA.
__device__ __forceinline__ void tma_load_multicast(uint32_t shared, const void* map,
                                                   uint32_t barrier, int x, int y, int z,
                                                   uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(ctas)
      : "memory");
}

// The same with a policy for L2.
__device__ __forceinline__ void tma_load_multicast_hinted(uint32_t shared, const void* map,
                                                          uint32_t barrier, int x, int y, int z,
                                                          uint16_t ctas, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(ctas), "l"(policy)
      : "memory");
}

// Prefetches the map itself before its first use.
__device__ __forceinline__ void tma_prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace flashinfer::ptx
