// State rows in storage that loses precision: integers and 8-bit floats with a scale per row, and
// 16-bit floats rounded stochastically, whose error is zero on average over many steps.
#pragma once

#include <cstdint>
#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/philox.cuh>
#include <flashinfer/linear_attention/state_rows.cuh>

namespace flashinfer {

namespace dtype {

struct alignas(2) int16 {
  uint16_t bits;
};
struct int8 {
  uint8_t bits;
};

// In the types' namespace, where Vector finds them.
__device__ __forceinline__ float to_float(int16 x) {
  return static_cast<float>(static_cast<int16_t>(x.bits));
}
__device__ __forceinline__ float to_float(int8 x) {
  return static_cast<float>(static_cast<int8_t>(x.bits));
}

}  // namespace dtype

// The scale keeps values within the range.
template <>
struct PackedPair<dtype::int16> {
  using Bits = uint32_t;
  __device__ __forceinline__ static Bits pack(float low, float high) {
    return (static_cast<uint32_t>(__float2int_rn(low)) & 0xffffu) |
           static_cast<uint32_t>(__float2int_rn(high)) << 16;
  }
};
template <>
struct PackedPair<dtype::int8> {
  using Bits = uint16_t;
  __device__ __forceinline__ static Bits pack(float low, float high) {
    return static_cast<uint16_t>((__float2int_rn(low) & 0xff) | __float2int_rn(high) << 8);
  }
};

// The largest magnitude of a scaled format; 0 for formats without a scale.
template <typename StateT>
inline constexpr float kScaledMax = 0.f;
template <>
inline constexpr float kScaledMax<dtype::int16> = 32767.f;
template <>
inline constexpr float kScaledMax<dtype::int8> = 127.f;
template <>
inline constexpr float kScaledMax<dtype::float8_e4m3fn> = 448.f;

// Rounds to one of the two neighbours at random, right on average; `random` has 16 bits.
__device__ __forceinline__ float round_stochastically(float x, uint32_t random, dtype::bfloat16) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;
  return __uint_as_float((bits + random) & 0xffff0000u);
}

__device__ __forceinline__ float round_stochastically(float x, uint32_t random, dtype::float16) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;
  constexpr float kMinNormal = 0x1p-14f;
  if (fabsf(x) >= kMinNormal) return __uint_as_float((bits + (random >> 3)) & ~0x1fffu);
  const float steps = fabsf(x) * 0x1p24f;
  return copysignf(floorf(steps + static_cast<float>(random) * 0x1p-16f) * 0x1p-24f, x);
}

struct StochasticRounding {
  uint64_t seed;
  int rounds;  // 0: to nearest
};

// `element`: index of the lane's first element in the pool, and with `token` the random counter.
template <typename Layout, typename StateT>
__device__ __forceinline__ void store_row_stochastically(StateT* row,
                                                         const float (&values)[Layout::kElements],
                                                         int lane,
                                                         const StochasticRounding& rounding,
                                                         uint64_t element, uint32_t token) {
  float rounded[Layout::kElements];
#pragma unroll
  for (int i = 0; i < Layout::kElements; i += 8) {
    const uint64_t counter = element + i;
    const uint4 random =
        philox4x32(rounding.seed,
                   {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), token,
                    static_cast<uint32_t>(lane)},
                   rounding.rounds);
    const uint32_t words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
    for (int j = 0; j < 8 && i + j < Layout::kElements; ++j) {
      const uint32_t bits = (words[j / 2] >> (16 * (j % 2))) & 0xffffu;
      rounded[i + j] = round_stochastically(values[i + j], bits, StateT{});
    }
  }
  store_row<Layout>(row, rounded, lane);
}

// Divides the row by its new scale, which maps the largest element to the format's largest value.
// All lanes of a warp call it; lanes whose row is not `valid` write nothing.
template <typename Layout, typename StateT>
__device__ __forceinline__ void store_row_scaled(StateT* row, float* scale,
                                                 const float (&values)[Layout::kElements], int lane,
                                                 bool valid) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < Layout::kElements; ++i) largest = fmaxf(largest, fabsf(values[i]));
  largest = warp_reduce_max(largest, Layout::kLanes);
  const float inverse = largest > 0.f ? kScaledMax<StateT> / largest : 0.f;
  float scaled[Layout::kElements];
#pragma unroll
  for (int i = 0; i < Layout::kElements; ++i) {
    scaled[i] = fminf(fmaxf(values[i] * inverse, -kScaledMax<StateT>), kScaledMax<StateT>);
  }
  if (valid) store_row<Layout>(row, scaled, lane);
  if (valid && lane == 0) *scale = largest / kScaledMax<StateT>;
}

}  // namespace flashinfer
