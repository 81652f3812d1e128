// In place of the product's header: the shared memory of CTA r begins at r * cta_bytes.
#pragma once

#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/tma.cuh>

namespace flashinfer::ptx {

inline uint32_t remote_address(uint32_t shared, uint32_t rank) {
  return shared % emulation::cta_bytes + rank * emulation::cta_bytes;
}
inline void mbarrier_arrive_relaxed(uint32_t remote_barrier) { mbarrier_arrive(remote_barrier); }

inline void store_remote(uint32_t shared, uint32_t barrier, uint32_t rank, const float (&x)[4]) {
  uint4 value;
  std::memcpy(&value, x, sizeof(x));
  store_shared_16(remote_address(shared, rank), value);
  emulated::Barrier& at = emulated::barrier_at(remote_address(barrier, rank));
  at.bytes -= sizeof(value);
  at.complete();
}

// The copy reads its source when someone looks at the barrier.
inline void bulk_copy_remote(uint32_t remote, uint32_t shared, uint32_t bytes,
                             uint32_t remote_barrier) {
  emulated::copy_later(remote, bytes, remote_barrier, [=] {
    std::memcpy(dynamic_shared + remote, dynamic_shared + shared, bytes);
  });
}

}  // namespace flashinfer::ptx
