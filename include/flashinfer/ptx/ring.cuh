// A ring of stages in shared memory; each stage has one barrier for "full" and one for "empty"
// (mbarrier.cuh).
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// Position in a ring of barriers. Consumers wait for the parity of the phase to get a full stage.
// Producers wait for the other parity, which a new barrier counts as complete.
template <int kStages>
struct Ring {
  uint32_t stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // The position `steps` ago, at most one round.
  __device__ __forceinline__ Ring before(uint32_t steps) const {
    const bool earlier_round = stage < steps;
    return {stage + (earlier_round ? kStages : 0) - steps, phase ^ earlier_round};
  }
};

}  // namespace flashinfer::ptx
