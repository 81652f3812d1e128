// In place of the product's header: ranks are processes, and what they share is mapped memory. A
// vector is no single access here either, so its words come one by one.
#pragma once

#include <cstdint>

#include <sched.h>

namespace flashinfer::ptx {

inline void release_flag(void* address, uint32_t value) {
  __atomic_store_n(static_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
}

inline uint32_t acquire_flag(const void* address) {
  return __atomic_load_n(static_cast<const uint32_t*>(address), __ATOMIC_ACQUIRE);
}

inline void store_peer(void* address, uint32_t data) {
  __atomic_store_n(static_cast<uint32_t*>(address), data, __ATOMIC_RELAXED);
}

inline void store_peer(void* address, uint4 data) {
  auto* words = static_cast<uint32_t*>(address);
  store_peer(words, data.x);
  store_peer(words + 1, data.y);
  store_peer(words + 2, data.z);
  store_peer(words + 3, data.w);
}

inline uint32_t load_peer_4(const void* address) {
  return __atomic_load_n(static_cast<const uint32_t*>(address), __ATOMIC_RELAXED);
}

inline uint4 load_peer_16(const void* address) {
  const auto* words = static_cast<const uint32_t*>(address);
  return {load_peer_4(words), load_peer_4(words + 1), load_peer_4(words + 2),
          load_peer_4(words + 3)};
}

// Other threads of the CTA run on, and other ranks as well.
inline void poll_again() {
  sched_yield();
  emulation::block.yield();
}

}  // namespace flashinfer::ptx
