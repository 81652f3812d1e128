// In place of the product's header: kernels run one after the other, so all is done or nothing.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

inline void count_done(uint32_t* counter) { ++*counter; }

inline void wait_done(const uint32_t* counter, uint32_t count) {
  if (*counter < count) emulation::fail("a wait for work that was not done");
}

inline uint32_t count_and_see(uint32_t* counter, uint32_t amount) {
  const uint32_t before = *counter;
  *counter += amount;
  return before;
}
inline void release() {}
inline uint32_t count_events(uint32_t* counter, uint32_t amount) {
  return count_and_see(counter, amount);
}
inline uint32_t see_count(const uint32_t* counter) { return *counter; }
inline void count_event(uint32_t* counter) { ++*counter; }
inline uint32_t see_events(const uint32_t* counter) { return *counter; }

}  // namespace flashinfer::ptx
