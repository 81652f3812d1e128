// Angles that bindings compute beforehand.
#pragma once

#include <cmath>
#include <cstring>
#include <flashinfer/rope/rope_params.h>

namespace flashinfer {

inline constexpr double kTwoPi = 6.283185307179586476925;

// Converts radians to turns, in units of 2^-64 turn, modulo 2^64.
inline uint64_t turns_of(double radians) {
  return static_cast<uint64_t>(std::ldexp(std::fmod(radians / kTwoPi, 1.), 64));
}

// Returns compute_frequencies(key). A model's frequencies do not change between calls, and
// computing them takes longer than a launch, so each thread keeps those of its latest key. Keys are
// compared as bytes: they have no padding.
template <typename Key>
const RopeFrequencies& frequencies_of(const Key& key) {
  thread_local Key last_key = {};
  thread_local RopeFrequencies last = {};
  if (std::memcmp(&key, &last_key, sizeof(key)) != 0) {
    last = compute_frequencies(key);
    last_key = key;
  }
  return last;
}

}  // namespace flashinfer
