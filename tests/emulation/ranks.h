// Ranks as processes that share mapped memory, each with an emulated GPU of its own.
#pragma once

#include <flashinfer/comm/workspace.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace emulation {

inline void* shared_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("no shared memory");
  return memory;
}

// A CommWorkspace for each rank, whose receive buffers begin with `fill`.
class Workspaces {
 public:
  Workspaces(uint32_t world_size, int64_t half_bytes, int fill) {
    constexpr uint32_t kFlags = 512;
    flashinfer::comm::CommWorkspace common = {};
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      common.buffers[rank] = shared_memory(2 * half_bytes);
      std::memset(common.buffers[rank], fill, 2 * half_bytes);
      common.flags[rank] = shared_memory(flashinfer::comm::kMaxRanks * kFlags * 4);
    }
    common.half_bytes = half_bytes;
    common.world_size = world_size;
    common.max_ctas = 3;
    common.num_flags = kFlags;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      auto* control = static_cast<flashinfer::comm::Control*>(shared_memory(4096));
      control->timeout_ns = 60'000'000'000;
      control->failure = reinterpret_cast<flashinfer::comm::Failure*>(control + 1);
      common.rank = rank;
      common.control = control;
      of_rank.push_back(common);
    }
  }

  std::vector<flashinfer::comm::CommWorkspace> of_rank;
};

// Runs `body(rank)` in a process each; false if one returns false or dies. The others then end,
// too.
inline bool run_ranks(uint32_t world_size, const std::function<bool(uint32_t)>& body) {
  std::fflush(stdout);
  std::vector<pid_t> children;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(120);
      const bool is_right = body(rank);
      std::fflush(stdout);
      _exit(is_right ? 0 : 1);
    }
    children.push_back(child);
  }
  bool all_right = true;
  for (size_t i = 0; i < children.size(); ++i) {
    int status = 0;
    wait(&status);
    if (status == 0) continue;
    if (all_right) {
      for (const pid_t child : children) kill(child, SIGTERM);
    }
    all_right = false;
  }
  return all_right;
}

}  // namespace emulation
