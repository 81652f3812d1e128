// In place of the product's header: kernels run one after the other, so all is done or nothing.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

inline void count_done(uint32_t* counter) { ++*counter; }

inline void wait_done(const uint32_t* counter, uint32_t count) {
  if (*counter < count) emulation::fail("a wait for work that was not done");
}

}  // namespace flashinfer::ptx
