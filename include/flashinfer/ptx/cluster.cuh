// Thread-block clusters (sm_90): rank, barrier, and access to the shared memory of the other CTAs.
// On older architectures, and in a launch without clusters, a cluster is one CTA.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

// Index of the cluster in a grid of one dimension.
__device__ __forceinline__ uint32_t cluster_index() {
#if __CUDA_ARCH__ >= 900
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
#else
  return blockIdx.x;
#endif
}

__device__ __forceinline__ uint32_t cluster_size() {
#if __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

// The two halves of a barrier over all threads of the cluster. Writes before the arrive (to any
// CTA's shared memory) are visible after the wait. All lanes of a warp call together.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The first half for those who publish no write, or have done so by a fence: the other arrive waits
// until the whole GPU sees what the thread wrote.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Shared-memory address of `pointer`'s counterpart in CTA `rank`.
__device__ __forceinline__ uint32_t cluster_address(const void* pointer, uint32_t rank) {
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
#else
  return local;
#endif
}

#if __CUDA_ARCH__ >= 900
#define FLASHINFER_SHARED_CLUSTER "shared::cluster"
#else
#define FLASHINFER_SHARED_CLUSTER "shared"
#endif

__device__ __forceinline__ void cluster_store(uint32_t address, uint64_t value) {
  asm volatile("st." FLASHINFER_SHARED_CLUSTER ".u64 [%0], %1;" ::"r"(address), "l"(value)
               : "memory");
}

__device__ __forceinline__ void cluster_store(uint32_t address, float value) {
  asm volatile("st." FLASHINFER_SHARED_CLUSTER ".f32 [%0], %1;" ::"r"(address), "f"(value)
               : "memory");
}

__device__ __forceinline__ void cluster_store(uint32_t address, uint32_t value) {
  asm volatile("st." FLASHINFER_SHARED_CLUSTER ".u32 [%0], %1;" ::"r"(address), "r"(value)
               : "memory");
}

__device__ __forceinline__ uint64_t cluster_load_u64(uint32_t address) {
  uint64_t value;
  asm volatile("ld." FLASHINFER_SHARED_CLUSTER ".u64 %0, [%1];"
               : "=l"(value)
               : "r"(address)
               : "memory");
  return value;
}

// Adds to a number and returns its old value.
__device__ __forceinline__ uint32_t cluster_add(uint32_t address, uint32_t value) {
  uint32_t before;
  asm volatile("atom." FLASHINFER_SHARED_CLUSTER ".add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address), "r"(value)
               : "memory");
  return before;
}

#undef FLASHINFER_SHARED_CLUSTER

}  // namespace flashinfer::ptx
