// Barriers (mbarrier.cuh) at which threads of other CTAs of the cluster arrive (sm_90), and which
// copies of 4 to 16 bytes by threads (cp.async) complete.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// Cluster address of the counterpart of `shared` in CTA `rank`.
__device__ __forceinline__ uint32_t remote_address(uint32_t shared, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}

// Arrives at a barrier by its cluster address. It is for completed reads only: it publishes no
// write, which would take a fence of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_relaxed(uint32_t remote_barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier)
               : "memory");
}

// Arrives at the barrier at the same offset in the shared memory of CTA `rank`, and releases what
// this thread wrote before to the cluster.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// mbarrier_wait() that also acquires what other CTAs of the cluster released.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Makes this thread arrive once its cp.async copies so far are complete; the barrier's count of
// arrivals includes it.
__device__ __forceinline__ void mbarrier_arrive_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Writes 16 bytes to the counterpart of `shared` in CTA `rank`. They count towards the phase of the
// counterpart of `barrier` there, whose completion makes them visible.
__device__ __forceinline__ void store_remote(uint32_t shared, uint32_t barrier, uint32_t rank,
                                             const float (&x)[4]) {
  asm volatile(
      "{\n"
      ".reg .b32 target, counter;\n"
      "mapa.shared::cluster.u32 target, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [target], {%3, %4, %5, %6}, "
      "[counter];\n"
      "}" ::"r"(shared),
      "r"(barrier), "r"(rank), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
      : "memory");
}

// Copies `bytes` of this CTA's shared memory, which the copy engine sees, to that of another CTA.
// They count towards the phase of a barrier there; both addresses there are the cluster's.
__device__ __forceinline__ void bulk_copy_remote(uint32_t remote, uint32_t shared, uint32_t bytes,
                                                 uint32_t remote_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(remote),
      "r"(shared), "r"(bytes), "r"(remote_barrier)
      : "memory");
}

}  // namespace flashinfer::ptx
