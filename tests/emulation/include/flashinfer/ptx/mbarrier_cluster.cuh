// In place of the product's header: the shared memory of CTA r begins at r * cta_bytes.
#pragma once

#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer::ptx {

inline uint32_t remote_address(uint32_t shared, uint32_t rank) {
  return shared % emulation::cta_bytes + rank * emulation::cta_bytes;
}
inline void mbarrier_arrive_relaxed(uint32_t remote_barrier) { mbarrier_arrive(remote_barrier); }

inline void store_remote_16(uint32_t remote, uint32_t remote_barrier, const uint4& value) {
  store_shared_16(remote, value);
  emulated::Barrier& at = emulated::barrier_at(remote_barrier);
  at.bytes -= sizeof(value);
  at.complete();
}

inline void store_remote(uint32_t shared, uint32_t barrier, uint32_t rank, const float (&x)[4]) {
  uint4 value;
  std::memcpy(&value, x, sizeof(x));
  store_remote_16(remote_address(shared, rank), remote_address(barrier, rank), value);
}

}  // namespace flashinfer::ptx
