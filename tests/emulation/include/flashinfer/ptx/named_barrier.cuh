// In place of the product's header: barriers among some warps, by their numbers.
#pragma once

namespace flashinfer::ptx {

namespace emulated {

struct NamedBarrier {
  int arrived = 0;
  unsigned rounds = 0;
};
inline NamedBarrier named_barriers[16];

}  // namespace emulated

inline void named_barrier_arrive(int id, int threads) {
  emulated::NamedBarrier& at = emulated::named_barriers[id];
  if (++at.arrived < threads) return;
  at.arrived = 0;
  ++at.rounds;
}

inline void named_barrier_sync(int id, int threads) {
  const unsigned round = emulated::named_barriers[id].rounds;
  named_barrier_arrive(id, threads);
  emulation::block.wait_for([=] { return emulated::named_barriers[id].rounds != round; });
}

}  // namespace flashinfer::ptx
