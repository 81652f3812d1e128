// How many streams models with hyper-connections have, and how many numbers mix them.
#pragma once

#include <cstdint>

namespace flashinfer {

inline constexpr int kMhcStreams = 4;
inline constexpr uint32_t kMhcMixes = kMhcStreams * (2 + kMhcStreams);  // pre, post and comb

}  // namespace flashinfer
