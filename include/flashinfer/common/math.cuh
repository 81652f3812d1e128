// Small integer helpers for host and device.
#pragma once

#ifdef __CUDACC__
#define FLASHINFER_HOST_DEVICE __host__ __device__
#else
#define FLASHINFER_HOST_DEVICE
#endif

namespace flashinfer {

template <typename T>
FLASHINFER_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
FLASHINFER_HOST_DEVICE constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

FLASHINFER_HOST_DEVICE constexpr int next_power_of_two(int x) {
  int power = 1;
  while (power < x) power *= 2;
  return power;
}

}  // namespace flashinfer
