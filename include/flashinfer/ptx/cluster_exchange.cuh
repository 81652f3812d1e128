// Data that the CTAs of a cluster push once into each other's shared memory, with a barrier that
// completes when all of it has arrived (st.async and mbarrier, sm_90). This is one trip, where a
// store and a cluster barrier are two. A cluster of one CTA, as on older architectures, uses plain
// stores and a CTA barrier.
#pragma once

#include <flashinfer/ptx/cluster.cuh>

namespace flashinfer::ptx {

// Lives in shared memory. Order of use: one thread calls init(bytes that this CTA will receive),
// all threads pass a cluster barrier, any thread calls push, all threads call wait.
struct ClusterExchange {
  uint64_t barrier;

  __device__ __forceinline__ void init(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n"
        "fence.mbarrier_init.release.cluster;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(address),
        "r"(bytes)
        : "memory");
#endif
  }

  // Writes 16 bytes to the counterpart of `to`, at a 16-byte address, in CTA `rank`.
  __device__ __forceinline__ void push(void* to, uint64_t first, uint64_t second, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    if (cluster_size() == 1) return store(to, first, second);
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(
            cluster_address(to, rank)),
        "l"(first), "l"(second), "r"(cluster_address(&barrier, rank))
        : "memory");
#else
    store(to, first, second);
#endif
  }

  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    if (cluster_size() == 1) return __syncthreads();
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(address)
        : "memory");
#else
    __syncthreads();
#endif
  }

 private:
  __device__ __forceinline__ static void store(void* to, uint64_t first, uint64_t second) {
    static_cast<uint64_t*>(to)[0] = first;
    static_cast<uint64_t*>(to)[1] = second;
  }
};

}  // namespace flashinfer::ptx
