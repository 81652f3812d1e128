// In place of the product's header: the host's clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace flashinfer::ptx {

inline uint64_t global_time_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace flashinfer::ptx
