// In place of the product's header: each CTA is a cluster of its own, so nobody arrives from afar.
#pragma once

#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer::ptx {

inline uint32_t remote_address(uint32_t shared, uint32_t) { return shared; }
inline void mbarrier_arrive_relaxed(uint32_t) { emulation::fail("an arrival from afar"); }

inline void store_remote(uint32_t shared, uint32_t barrier, uint32_t, const float (&x)[4]) {
  std::memcpy(dynamic_shared + shared, x, sizeof(x));
  emulated::Barrier& at = emulated::barrier_at(barrier);
  at.bytes -= sizeof(x);
  at.complete();
}

}  // namespace flashinfer::ptx
