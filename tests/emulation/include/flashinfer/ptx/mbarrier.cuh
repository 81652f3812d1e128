// In place of the product's header: barriers of shared memory that count arrivals of threads.
#pragma once

#include <flashinfer/ptx/cp_async.cuh>

#include <cstdint>
#include <map>

namespace flashinfer::ptx {

namespace emulated {

struct Barrier {
  int arrivals, pending;
  uint32_t phase;
};
inline std::map<uint32_t, Barrier> barriers;

inline Barrier& barrier_at(uint32_t address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) emulation::fail("a barrier that is not initialised");
  return found->second;
}

}  // namespace emulated

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  emulated::barriers[barrier] = {arrivals, arrivals, 0};
}
inline void mbarrier_init_fence() {}

inline void mbarrier_arrive(uint32_t barrier) {
  emulated::Barrier& at = emulated::barrier_at(barrier);
  if (--at.pending > 0) return;
  at.pending = at.arrivals;
  ++at.phase;
}

// The thread's copies happen now, at the earliest moment at which others may count on them.
inline void cp_async_arrive(uint32_t barrier) {
  cp_async_commit();
  cp_async_wait<0>();
  mbarrier_arrive(barrier);
}

inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  return emulated::barrier_at(barrier).phase % 2 != parity;
}

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulation::block.wait_for([=] { return mbarrier_test(barrier, parity); });
}

}  // namespace flashinfer::ptx
