// In place of the product's header: threads wait until as many have come as a barrier is for.
#pragma once

namespace flashinfer::ptx {

namespace emulated {

struct NamedBarrier {
  int arrived = 0, phase = 0;
};
inline NamedBarrier named_barriers[16];

}  // namespace emulated

inline void named_barrier_arrive(int id, int threads) {
  emulated::NamedBarrier& barrier = emulated::named_barriers[id];
  if (++barrier.arrived == threads) barrier.arrived = 0, ++barrier.phase;
}

inline void named_barrier_sync(int id, int threads) {
  const emulated::NamedBarrier& barrier = emulated::named_barriers[id];
  const int phase = barrier.phase;
  named_barrier_arrive(id, threads);
  emulation::block.wait_for([&barrier, phase] { return barrier.phase != phase; });
}

}  // namespace flashinfer::ptx
