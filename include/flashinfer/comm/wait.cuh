// Waiting for another GPU, with a time-out: a rank that died or calls something else must end in an
// error here, not in a hang.
#pragma once

#include <cstdint>
#include <flashinfer/comm/workspace.h>
#include <flashinfer/ptx/clock.cuh>
#include <flashinfer/ptx/peer.cuh>

namespace flashinfer::comm {

namespace detail {

// Returns when the waiting began, while there is time left. Else it reports `peer` and stops the
// program with an error: a result that a time-out made wrong must not be used, and a replayed graph
// returns nothing that could say so.
__device__ __noinline__ uint64_t check_time(const Control* control, uint64_t start, uint32_t peer,
                                            Wait where) {
  const uint64_t now = ptx::global_time_ns();
  if (start == 0) return now;
  if (now - start < *reinterpret_cast<const volatile uint64_t*>(&control->timeout_ns)) return start;
  volatile Failure* failure = control->failure;
  failure->peer = peer;
  failure->calls = control->ticket >> 16;
  failure->where = static_cast<uint32_t>(where);
  __threadfence_system();
  failure->is_set = 1;
  __threadfence_system();
  __trap();
  return start;
}

}  // namespace detail

// Counts the rounds of one waiting loop. The clock is read every 1024 rounds only, since reading it
// takes as long as a round.
class Patience {
 public:
  __device__ __forceinline__ Patience(const Control* control, Wait where)
      : control_(control), where_(where) {}

  // Ends one round of waiting for `peer`.
  __device__ __forceinline__ void spend(uint32_t peer) {
    ptx::poll_again();
    if ((++rounds_ & 1023u) == 0) start_ = detail::check_time(control_, start_, peer, where_);
  }

  // Begins the next wait.
  __device__ __forceinline__ void renew() {
    start_ = 0;
    rounds_ = 0;
  }

 private:
  const Control* control_;
  uint64_t start_ = 0;
  uint32_t rounds_ = 0;
  Wait where_;
};

}  // namespace flashinfer::comm
