// Largest magnitude of values spread over an aligned power-of-two part of a warp. NaN exceeds
// everything.
#pragma once

#include <cstdint>
#include <flashinfer/common/vec.cuh>
#include <type_traits>

namespace flashinfer {

// Collects magnitudes of T in one register. 16-bit types are kept in their own format, two at a
// time, which halves the work.
template <typename T>
class MagnitudeMax {
 public:
  template <int N>
  __device__ __forceinline__ void include(const Vector<T, N>& x) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) bits_ = larger(bits_, __float_as_uint(x[i]));
    } else if constexpr (N == 1) {
      bits_ = larger(bits_, x.elements[0].bits);
    } else {
      const auto* pairs = reinterpret_cast<const uint32_t*>(x.elements);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) bits_ = larger(bits_, pairs[i]);
    }
  }

  // Maximum over kLanes lanes; each of them gets the result. All lanes of the warp must call.
  template <int kLanes>
  __device__ __forceinline__ float reduce() {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      bits_ = larger(bits_, __shfl_xor_sync(0xffffffffu, bits_, offset));
    }
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(bits_);
    } else {
      bits_ = larger(bits_, bits_ >> 16);
      return to_float(T{static_cast<uint16_t>(bits_ & 0x7fffu)});
    }
  }

 private:
  // max(a, |b|); a is not negative, but may have any sign in 16 bits on sm_86 and later.
  __device__ __forceinline__ static uint32_t larger(uint32_t a, uint32_t b) {
    if constexpr (sizeof(T) == 4) {
#if __CUDA_ARCH__ < 800
      // max.NaN needs sm_80. Magnitudes order like their bits, NaN above infinity.
      return max(a, b & 0x7fffffffu);
#else
      float value;
      asm("max.NaN.f32 %0, %1, %2;"
          : "=f"(value)
          : "f"(__uint_as_float(a)), "f"(fabsf(__uint_as_float(b))));
      return __float_as_uint(value);
#endif
    } else {
#if __CUDA_ARCH__ < 800
      return __vmaxu2(a, b & 0x7fff7fffu);
#else
      uint32_t result;
#if __CUDA_ARCH__ < 860
      b &= 0x7fff7fffu;
#define FLASHINFER_MAGNITUDES ".NaN"
#else
#define FLASHINFER_MAGNITUDES ".NaN.xorsign.abs"  // takes magnitudes itself, and leaves a sign
#endif
      if constexpr (std::is_same_v<T, dtype::bfloat16>) {
        asm("max" FLASHINFER_MAGNITUDES ".bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
      } else {
        asm("max" FLASHINFER_MAGNITUDES ".f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
      }
#undef FLASHINFER_MAGNITUDES
      return result;
#endif
    }
  }

  uint32_t bits_ = 0;
};

}  // namespace flashinfer
