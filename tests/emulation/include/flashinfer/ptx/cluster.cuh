// In place of the product's header: each CTA is a cluster of its own, unless CTAs run side by side
// (EMULATION_CLUSTERS).
#pragma once

#include <flashinfer/ptx/shared.cuh>

namespace flashinfer::ptx {

inline uint32_t cluster_rank() { return emulation::block.thread() / blockDim.x; }
inline uint32_t cluster_size() { return emulation::cluster_ctas; }
inline void cluster_arrive() {}
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() { emulation::block.wait(emulation::State::at_block_barrier); }
inline uint32_t cluster_address(const void* pointer, uint32_t) { return shared_address(pointer); }
inline uint64_t cluster_load_u64(uint32_t address) {
  return emulated::load_shared<uint64_t>(address);
}
template <typename T>
void cluster_store(uint32_t address, T value) {
  emulated::store_shared(address, value);
}

}  // namespace flashinfer::ptx
