// In place of the product's header: copies happen when they are waited for, and until then leave
// NaN where they will go. A wait too few reads the NaN; a copy too early spoils what others read.
#pragma once

#include <deque>
#include <vector>

namespace flashinfer::ptx {

namespace emulated {

constexpr int kMaxThreads = 1024;

struct Copy {
  char* destination;
  const void* source;  // null: zeros
  int bytes;
};
inline std::vector<Copy> open_group[kMaxThreads];
inline std::deque<std::vector<Copy>> groups[kMaxThreads];

}  // namespace emulated

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - dynamic_shared);
}

template <int kBytes>
inline void copy_async(uint32_t address, const void* source, bool valid) {
  if (address % kBytes != 0) emulation::fail("cp.async to a misaligned address");
  if (valid && reinterpret_cast<uintptr_t>(source) % kBytes != 0) {
    emulation::fail("cp.async from a misaligned address");
  }
  if (address + kBytes > emulation::shared_bytes) emulation::fail("cp.async past shared memory");
  std::memset(dynamic_shared + address, 0xff, kBytes);
  emulated::open_group[emulation::block.thread()].push_back(
      {dynamic_shared + address, valid ? source : nullptr, kBytes});
}

inline void cp_async_16(uint32_t address, const void* source, bool valid) {
  copy_async<16>(address, source, valid);
}
inline void cp_async_8(uint32_t address, const void* source, bool valid) {
  copy_async<8>(address, source, valid);
}
inline void cp_async_4(uint32_t address, const void* source, bool valid) {
  copy_async<4>(address, source, valid);
}

inline void cp_async_commit() {
  auto& open = emulated::open_group[emulation::block.thread()];
  emulated::groups[emulation::block.thread()].push_back(std::move(open));
  open.clear();
}

template <int kPending>
inline void cp_async_wait() {
  auto& groups = emulated::groups[emulation::block.thread()];
  while (groups.size() > kPending) {
    for (const emulated::Copy& copy : groups.front()) {
      if (copy.source != nullptr) {
        std::memcpy(copy.destination, copy.source, copy.bytes);
      } else {
        std::memset(copy.destination, 0, copy.bytes);
      }
    }
    groups.pop_front();
  }
}

// At the end of a CTA, whose shared memory the next one takes.
inline void check_no_copy_is_left() {
  for (int thread = 0; thread < emulated::kMaxThreads; ++thread) {
    bool is_left = !emulated::open_group[thread].empty();
    for (const auto& group : emulated::groups[thread]) is_left |= !group.empty();
    if (is_left) emulation::fail("a CTA ends with copies in flight");
    emulated::groups[thread].clear();
  }
}

}  // namespace flashinfer::ptx
