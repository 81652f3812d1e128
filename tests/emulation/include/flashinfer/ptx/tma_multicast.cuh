// In place of the product's header: there is no cache.
#pragma once

#include <flashinfer/ptx/mbarrier_cluster.cuh>
#include <flashinfer/ptx/tma.cuh>

namespace flashinfer::ptx {

inline uint64_t l2_evict_first() { return 0; }
inline uint64_t l2_evict_normal() { return 0; }
inline bool elect_one() {
  emulation::block.exchange(0);
  return threadIdx.x % 32 == 0;
}
inline void tma_load_hinted(uint32_t shared, const void* map, uint32_t barrier, int x, int y, int z,
                            uint64_t) {
  tma_load(shared, map, barrier, x, y, z);
}
inline void tma_load_multicast(uint32_t shared, const void* map, uint32_t barrier, int x, int y,
                               int z, uint16_t ctas) {
  for (unsigned rank = 0; rank < emulation::cluster_ctas; ++rank) {
    if ((ctas >> rank & 1) == 0) continue;
    tma_load(remote_address(shared, rank), map, remote_address(barrier, rank), x, y, z);
  }
}
inline void tma_load_multicast_hinted(uint32_t shared, const void* map, uint32_t barrier, int x,
                                      int y, int z, uint16_t ctas, uint64_t) {
  tma_load_multicast(shared, map, barrier, x, y, z, ctas);
}
inline void tma_prefetch_map(const void*) {}

}  // namespace flashinfer::ptx
