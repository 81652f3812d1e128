// In place of the product's header.
#pragma once

#include <map>

namespace flashinfer::ptx {

namespace emulated {

struct NamedBarrier {
  int arrived = 0;
  uint32_t phase = 0;
};
inline std::map<int, NamedBarrier> named_barriers;

}  // namespace emulated

inline void named_barrier_arrive(int id, int threads) {
  emulated::NamedBarrier& barrier = emulated::named_barriers[id];
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.phase;
}

inline void named_barrier_sync(int id, int threads) {
  const uint32_t phase = emulated::named_barriers[id].phase;
  named_barrier_arrive(id, threads);
  emulation::block.wait_for([=] { return emulated::named_barriers[id].phase != phase; });
}

}  // namespace flashinfer::ptx
