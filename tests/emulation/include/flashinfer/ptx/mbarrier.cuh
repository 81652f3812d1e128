// In place of the product's header: barriers of shared memory that count arrivals of threads, and
// bytes of copies, which happen when someone looks at the barrier (tma.cuh).
#pragma once

#include <flashinfer/ptx/cp_async.cuh>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace flashinfer::ptx {

namespace emulated {

struct Barrier {
  int arrivals, pending;
  uint32_t phase;
  int64_t bytes;  // that are expected and have not been asked for
  std::vector<std::function<void()>> copies;

  void complete() {
    if (pending > 0 || bytes != 0) return;
    for (const auto& copy : copies) copy();
    copies.clear();
    pending = arrivals;
    ++phase;
  }
};
inline std::map<uint32_t, Barrier> barriers;

inline Barrier& barrier_at(uint32_t address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) emulation::fail("a barrier that is not initialised");
  return found->second;
}

}  // namespace emulated

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  emulated::barriers[barrier] = {arrivals, arrivals, 0, 0, {}};
}
inline void mbarrier_init_fence() {}

inline void mbarrier_arrive(uint32_t barrier) {
  emulated::Barrier& at = emulated::barrier_at(barrier);
  --at.pending;
  at.complete();
}

inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emulated::barrier_at(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}

inline void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  emulated::barrier_at(barrier).bytes += bytes;
}

// The thread's copies happen now, at the earliest moment at which others may count on them.
inline void cp_async_arrive(uint32_t barrier) {
  cp_async_commit();
  cp_async_wait<0>();
  mbarrier_arrive(barrier);
}

inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  emulated::Barrier& at = emulated::barrier_at(barrier);
  if (!at.copies.empty()) at.complete();
  return at.phase % 2 != parity;
}

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulation::block.wait_for([=] { return mbarrier_test(barrier, parity); });
}
inline void mbarrier_wait_soon(uint32_t barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);
}

}  // namespace flashinfer::ptx
