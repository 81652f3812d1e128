// In place of the product's header.
#pragma once

#include <map>

namespace flashinfer::ptx {

namespace emulated {

struct NamedBarrier {
  int arrived = 0;
  uint32_t phase = 0;
  bool any = false, found = false;  // what was said, now and before the last phase ended
};
inline std::map<int, NamedBarrier> named_barriers;

// Each CTA of a cluster has its own.
inline int named_barrier_key(int id) { return static_cast<int>(blockIdx.x) * 16 + id; }

}  // namespace emulated

inline void named_barrier_arrive(int id, int threads) {
  emulated::NamedBarrier& barrier = emulated::named_barriers[emulated::named_barrier_key(id)];
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  barrier.found = barrier.any;
  barrier.any = false;
  ++barrier.phase;
}

inline void named_barrier_sync(int id, int threads) {
  const int key = emulated::named_barrier_key(id);
  const uint32_t phase = emulated::named_barriers[key].phase;
  named_barrier_arrive(id, threads);
  emulation::block.wait_for([=] { return emulated::named_barriers[key].phase != phase; });
}

inline bool named_barrier_any(int id, int threads, bool said) {
  const int key = emulated::named_barrier_key(id);
  emulated::named_barriers[key].any |= said;
  named_barrier_sync(id, threads);
  return emulated::named_barriers[key].found;
}

}  // namespace flashinfer::ptx
