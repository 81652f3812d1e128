// Converts 8-bit floats to pairs of float16 for mma.
#pragma once

#include <cstdint>
#include <type_traits>
#include <flashinfer/common/dtype.cuh>

namespace flashinfer {

// Converts four 8-bit floats to four float16, exactly, NaN and infinities included; `low` gets the
// first two.
template <typename T>
__device__ __forceinline__ void float8_to_half2(uint32_t bytes, uint32_t& low, uint32_t& high) {
  if constexpr (std::is_same_v<T, dtype::float8_e5m2>) {
    low = __byte_perm(bytes, 0, 0x1404);  // the upper bytes of two float16
    high = __byte_perm(bytes, 0, 0x3424);
  } else {
#if __CUDA_ARCH__ >= 890
    // Unpacked in PTX, the upper half needs no shift: the instruction can name it.
    asm("{\n"
        ".reg .b16 first, second;\n"
        "mov.b32 {first, second}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, first;\n"
        "cvt.rn.f16x2.e4m3x2 %1, second;\n"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
#else
    const auto value = [&](int i) { return to_float(T{static_cast<uint8_t>(bytes >> 8 * i)}); };
    low = PackedPair<dtype::float16>::pack(value(0), value(1));
    high = PackedPair<dtype::float16>::pack(value(2), value(3));
#endif
  }
}

// Converts four values of one K row to the B fragment {b0, b1} for the columns that float8_column
// names.
template <typename T>
__device__ __forceinline__ void float8_keys(uint32_t bytes, uint32_t& b0, uint32_t& b1) {
  float8_to_half2<T>(bytes, b0, b1);
}

// Converts two columns of two V rows, as a transposing ldmatrix of byte pairs leaves them, to the
// rows' values of the even column and of the odd column.
template <typename T>
__device__ __forceinline__ void float8_values(uint32_t bytes, uint32_t& even, uint32_t& odd) {
  float8_to_half2<T>(__byte_perm(bytes, 0, 0x3120), even, odd);
}

}  // namespace flashinfer
