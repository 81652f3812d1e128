// Memory that the ranks of one host share, as a kernel sees it. Plain C++: Python fills a
// CommWorkspace by the layout of its fields (flashinfer/comm/peer_workspace.py) and passes its
// bytes.
#pragma once

#include <cstdint>

namespace flashinfer::comm {

inline constexpr int kMaxRanks = 16;

// What a wait that timed out says. It lies in host memory, so that it outlives the failed kernel.
struct Failure {
  uint32_t is_set;
  uint32_t peer;   // rank whose data or flag did not come
  uint32_t calls;  // calls completed on the workspace, modulo 2^16
  uint32_t where;  // the kernel: see Wait
};

// The kernel that waited.
enum class Wait : uint32_t {
  kOneShot = 0,
  kReduceScatter = 1,
  kAllGather = 2,
  kExchange = 3,
  kDispatch = 4,
  kCombine = 5,
};

// State of one rank, in its own device memory.
struct Control {
  uint32_t ticket;      // number of calls in the upper 16 bits: see CallCounter
  uint32_t generation;  // number of the experts' exchange
  uint64_t timeout_ns;
  Failure* failure;
};

struct CommWorkspace {
  void* buffers[kMaxRanks];  // of every rank, as addresses of this process
  void* flags[kMaxRanks];    // uint32_t[kMaxRanks][blocks], zero at first
  Control* control;          // of this rank
  int64_t half_bytes;        // each buffer has two halves that calls use in turn
  uint32_t rank;
  uint32_t world_size;
  uint32_t max_ctas;   // CTAs that are resident together, shared by the ranks of one GPU
  uint32_t num_flags;  // blocks of the flags
};

}  // namespace flashinfer::comm
