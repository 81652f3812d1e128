// Arithmetic of one group: from its largest magnitude to its scale, and from values to codes.
//
//   scale = amax / largest code, in the format of the scale
//   code = x / scale, rounded to nearest even and saturated
//
// Every step, divisions included, is a correctly rounded float operation, so that PyTorch's float32
// arithmetic gives the same bits.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/exp2.cuh>
#include <flashinfer/common/float4.cuh>
#include <flashinfer/common/vec.cuh>
#include <type_traits>

namespace flashinfer {

// Formats of the codes; kMax is the value of the largest code.
namespace code {

struct int8 {
  static constexpr float kMax = 127.f;
  static constexpr int kBits = 8;
};

struct e4m3 {
  static constexpr float kMax = 448.f;
  static constexpr int kBits = 8;
};

struct e5m2 {
  static constexpr float kMax = 57344.f;
  static constexpr int kBits = 8;
};

struct e2m1 {
  static constexpr float kMax = 6.f;
  static constexpr int kBits = 4;
};

}  // namespace code

// Codes of N consecutive elements.
template <typename Code, int N>
struct CodeVector {
  using Word = typename detail::WordOf<N * Code::kBits / 8>::type;

  union {
    Word word;
    uint16_t pairs[N * Code::kBits < 16 ? 1 : N * Code::kBits / 16];
    uint32_t quads[N * Code::kBits < 32 ? 1 : N * Code::kBits / 32];
  };

  // `scaled` holds x / scale; for 4-bit codes x / scale / 2, as pack_e2m1 takes it.
  __device__ __forceinline__ void from_floats(const float (&scaled)[N]) {
    if constexpr (!std::is_same_v<Code, code::e2m1>) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) pairs[i] = pair(scaled[2 * i], scaled[2 * i + 1]);
    } else if constexpr (N <= 8) {
      word = static_cast<Word>(pack_e2m1(scaled));
    } else {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        float eight[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) eight[j] = scaled[8 * i + j];
        quads[i] = pack_e2m1(eight);
      }
    }
  }

 private:
  __device__ __forceinline__ static uint16_t pair(float low, float high) {
    if constexpr (std::is_same_v<Code, code::e4m3>) {
      return PackedPair<dtype::float8_e4m3fn>::pack(low, high);
    } else if constexpr (std::is_same_v<Code, code::e5m2>) {
      return PackedPair<dtype::float8_e5m2>::pack(low, high);
    } else {
      uint32_t a, b;  // NaN becomes 0
      asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(a) : "f"(low));
      asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(b) : "f"(high));
      return static_cast<uint16_t>(__byte_perm(a, b, 0x0040));
    }
  }
};

// Formats of the scales. `of<Code>(amax, eps, global)` makes a group's scale from its largest
// magnitude (NaN if the group has one); `stored` is the scale as it is written; `apply<T>(x)`, for
// x of type T, returns the input of CodeVector.
namespace scale {

inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// pack_e2m1 takes half of the scaled value.
template <typename Code>
inline constexpr float kFactor = std::is_same_v<Code, code::e2m1> ? 0.5f : 1.f;

// The smallest k >= -127 for which amax <= kMax * 2^k; amax is finite and not negative. The result
// is exact: it compares exponents, then mantissas.
template <typename Code>
__device__ __forceinline__ int least_exponent(float amax) {
  const uint32_t bits = __float_as_uint(amax), max_bits = __float_as_uint(Code::kMax);
  const int k = static_cast<int>(bits >> 23) - static_cast<int>(max_bits >> 23) +
                ((bits & 0x7fffffu) > (max_bits & 0x7fffffu) ? 1 : 0);
  return k < -127 ? -127 : k;
}

// Returns 2^k for k from -127 (a subnormal) to 127.
__device__ __forceinline__ float power_of_two(int k) {
  return __uint_as_float(k == -127 ? 0x00400000u : static_cast<uint32_t>(k + 127) << 23);
}

// Larger of x and eps; unlike max(), it keeps a NaN.
__device__ __forceinline__ float at_least(float x, float eps) { return x < eps ? eps : x; }

// x / y, correctly rounded, from the rounded reciprocal of y and without the range checks of the
// division operator. This was checked for every mantissa of y with every x of at most 11
// significant bits, and for every mantissa of x with the constants and the E4M3 numbers that are
// divisors here. x, y and the quotient must be normal numbers, or the result too small to matter.
__device__ __forceinline__ float divide(float x, float y, float reciprocal) {
  const float quotient = x * reciprocal;
  // With these signs the quotient of a negative zero stays negative.
  const float excess = fmaf(quotient, y, -x);
  return fmaf(-excess, reciprocal, quotient);
}

// 1 / y, correctly rounded, where y and its reciprocal are normal.
__device__ __forceinline__ float reciprocal_of(float y) {
  const float estimate = math::ptx_rcp(y);
  return fmaf(estimate, -fmaf(estimate, y, -1.f), estimate);
}

// amax / kMax in float32. A group with an infinity has an infinite scale: its finite values become
// 0, infinite ones NaN.
struct float32 {
  using Stored = float;
  static constexpr bool kTakesGlobal = false;
  Stored stored;
  float reciprocal;
  float divisor;

  template <typename Code>
  __device__ __forceinline__ static float32 of(float amax, float eps, float) {
    // This multiplies by 0 instead of dividing, since correcting the quotient would give infinity
    // times zero.
    if (__float_as_uint(amax) == kInfinityBits) return {amax, 0.f, 0.f};
    const float s = divide(at_least(amax, eps), Code::kMax, 1.f / Code::kMax);
    return {s, reciprocal_of(s), s};
  }

  template <typename T>
  __device__ __forceinline__ float apply(float x) const {
    if constexpr (sizeof(T) == 4) return divisor == 0.f ? x * reciprocal : x / divisor;
    return divide(x, divisor, reciprocal);
  }
};

// The smallest power of two that is at least amax / kMax, in float32. Infinity and NaN behave as in
// float32.
struct power_of_two_float32 {
  using Stored = float;
  static constexpr bool kTakesGlobal = false;
  Stored stored;
  float multiplier;

  template <typename Code>
  __device__ __forceinline__ static power_of_two_float32 of(float amax, float eps, float) {
    const float bounded = at_least(amax, eps);
    if (!(__float_as_uint(bounded) < kInfinityBits))
      return {bounded, bounded == bounded ? 0.f : bounded};
    const int k = least_exponent<Code>(bounded);
    return {power_of_two(k), power_of_two(-k)};
  }

  template <typename T>
  __device__ __forceinline__ float apply(float x) const {
    return x * multiplier;
  }
};

// The same scale, for global * x, as a biased exponent in a byte. NaN is 255. Infinity takes the
// largest power, 254, and its elements saturate.
struct ue8m0 {
  using Stored = uint8_t;
  static constexpr bool kTakesGlobal = true;
  Stored stored;
  float multiplier;

  template <typename Code>
  __device__ __forceinline__ static ue8m0 of(float amax, float, float global) {
    const float scaled = amax * global;
    if (scaled != scaled) return {255, scaled};
    const int k = __float_as_uint(scaled) == kInfinityBits ? 127 : least_exponent<Code>(scaled);
    return {static_cast<uint8_t>(k + 127), kFactor<Code> * (global * power_of_two(-k))};
  }

  template <typename T>
  __device__ __forceinline__ float apply(float x) const {
    return x * multiplier;
  }
};

// Rounds global * amax / kMax to nearest in E4M3. The codes are those of x * (global / scale), and
// 0 if the scale is 0.
struct e4m3 {
  using Stored = uint8_t;
  static constexpr bool kTakesGlobal = true;
  Stored stored;
  float multiplier;

  template <typename Code>
  __device__ __forceinline__ static e4m3 of(float amax, float, float global) {
    float product = amax * global;  // finite, since correcting an infinite quotient gives NaN
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(product) : "f"(product), "f"(1e6f));
#else
    product = product > 1e6f ? 1e6f : product;  // a NaN stays
#endif
    const auto rounded =
        from_float<dtype::float8_e4m3fn>(divide(product, Code::kMax, 1.f / Code::kMax));
    const float s = to_float(rounded);
    const float quotient = divide(global, s, reciprocal_of(s));
    return {rounded.bits, s == 0.f ? 0.f : kFactor<Code> * quotient};
  }

  template <typename T>
  __device__ __forceinline__ float apply(float x) const {
    return x * multiplier;
  }
};

}  // namespace scale
}  // namespace flashinfer
