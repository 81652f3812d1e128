// 8-bit floats to pairs of float16 for mma.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>

namespace flashinfer {

// Two 8-bit floats to two float16, exactly, NaN and infinities included.
template <typename T>
__device__ __forceinline__ uint32_t float8_pair_to_half2(uint16_t pair) {
  if constexpr (std::is_same_v<T, dtype::float8_e5m2>) {
    return __byte_perm(pair, 0, 0x1404);  // the upper bytes of two float16
  } else {
#if __CUDA_ARCH__ >= 890
    uint32_t result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
    return result;
#else
    const auto value = [](uint32_t code) { return to_float(T{static_cast<uint8_t>(code)}); };
    return PackedPair<dtype::float16>::pack(value(pair & 0xffu), value(pair >> 8));
#endif
  }
}

// Four values of one K row: the B fragment {b0, b1} for the columns that float8_column names.
template <typename T>
__device__ __forceinline__ void float8_keys(uint32_t bytes, uint32_t& b0, uint32_t& b1) {
  b0 = float8_pair_to_half2<T>(static_cast<uint16_t>(bytes));
  b1 = float8_pair_to_half2<T>(static_cast<uint16_t>(bytes >> 16));
}

// Two columns of two V rows, as a transposing ldmatrix of byte pairs leaves them: the rows' values
// of the even column and of the odd one.
template <typename T>
__device__ __forceinline__ void float8_values(uint32_t bytes, uint32_t& even, uint32_t& odd) {
  const uint32_t columns = __byte_perm(bytes, 0, 0x3120);
  even = float8_pair_to_half2<T>(static_cast<uint16_t>(columns));
  odd = float8_pair_to_half2<T>(static_cast<uint16_t>(columns >> 16));
}

}  // namespace flashinfer
