// mma.sync.m16n8k16 (sm_80): D += A B with 16-bit inputs and float accumulation by one warp.
//
// Lane l with g = l / 4, t = l % 4 holds
//   A (16x16): a[0] (g, 2t..), a[1] (g + 8, 2t..), a[2] (g, 2t + 8..), a[3] (g + 8, 2t + 8..)
//   B (16x8):  b0 (2t.., g), b1 (2t + 8.., g)
//   D (16x8):  d[0], d[1] (g, 2t..), d[2], d[3] (g + 8, 2t..)
#pragma once

#include <cstdint>
#include <type_traits>
#include <flashinfer/common/dtype.cuh>

namespace flashinfer::ptx {

template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  static_assert(std::is_same_v<T, dtype::float16> || std::is_same_v<T, dtype::bfloat16>);
  if constexpr (std::is_same_v<T, dtype::float16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace flashinfer::ptx
