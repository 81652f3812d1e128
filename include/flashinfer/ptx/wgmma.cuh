// Products of a warpgroup (wgmma, sm_90a): 64 rows of A times N columns of B, summed in registers.
// They run on their own from wgmma_commit() to the wgmma_wait() that covers them; until then
// neither the sums nor A's registers may be touched.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>
#include <type_traits>

namespace flashinfer::ptx {

// Ahead of the first product that reads registers which ordinary instructions wrote.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// After the wait: keeps the compiler from reading sums ahead of it.
template <int kTiles>
__device__ __forceinline__ void wgmma_done(float (&d)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
  }
}

// The same for fragments of A, whose registers the compiler would else give to others ahead of the
// wait, and move the wait up to there.
template <int kSteps>
__device__ __forceinline__ void wgmma_done(uint32_t (&a)[kSteps][1][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    asm volatile("" : "+r"(a[i][0][0]), "+r"(a[i][0][1]), "+r"(a[i][0][2]), "+r"(a[i][0][3]));
  }
}

// Describes an operand in shared memory whose rows are 128 bytes with the 128-byte swizzle: chunk c
// of 16 bytes of row r lies at chunk c ^ (r % 8), from a multiple of 1024 bytes on. `address` moves
// on by 32 bytes (K-major) or two groups (MN-major) per step of 16 along k. `chunk_stride`: bytes
// from 64 columns to the next 64 of an MN-major operand; `group_stride`: from eight rows to the
// next. 8-bit operands are K-major, 32 bytes per step of 32.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, uint32_t chunk_stride = 0,
                                                  uint32_t group_stride = 1024) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(group_stride >> 4) << 32 |
         static_cast<uint64_t>(chunk_stride >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// The same operand `bytes` further on: an addition to its address alone.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t operand, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(operand) + (bytes >> 4);
  return (operand >> 32 << 32) | low;
}

// clang-format off
#define FLASHINFER_SUM(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FLASHINFER_SUMS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHINFER_OUTPUTS_64(d) \
  FLASHINFER_SUM(d, 0), FLASHINFER_SUM(d, 1), FLASHINFER_SUM(d, 2), FLASHINFER_SUM(d, 3), \
  FLASHINFER_SUM(d, 4), FLASHINFER_SUM(d, 5), FLASHINFER_SUM(d, 6), FLASHINFER_SUM(d, 7)
#define FLASHINFER_SUMS_96 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHINFER_OUTPUTS_96(d) \
  FLASHINFER_SUM(d, 0), FLASHINFER_SUM(d, 1), FLASHINFER_SUM(d, 2), FLASHINFER_SUM(d, 3), \
  FLASHINFER_SUM(d, 4), FLASHINFER_SUM(d, 5), FLASHINFER_SUM(d, 6), FLASHINFER_SUM(d, 7), \
  FLASHINFER_SUM(d, 8), FLASHINFER_SUM(d, 9), FLASHINFER_SUM(d, 10), FLASHINFER_SUM(d, 11)
#define FLASHINFER_SUMS_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHINFER_OUTPUTS_128(d) \
  FLASHINFER_SUM(d, 0), FLASHINFER_SUM(d, 1), FLASHINFER_SUM(d, 2), FLASHINFER_SUM(d, 3), \
  FLASHINFER_SUM(d, 4), FLASHINFER_SUM(d, 5), FLASHINFER_SUM(d, 6), FLASHINFER_SUM(d, 7), \
  FLASHINFER_SUM(d, 8), FLASHINFER_SUM(d, 9), FLASHINFER_SUM(d, 10), FLASHINFER_SUM(d, 11), \
  FLASHINFER_SUM(d, 12), FLASHINFER_SUM(d, 13), FLASHINFER_SUM(d, 14), FLASHINFER_SUM(d, 15)

// Only 16-bit operands may be MN-major.
#define FLASHINFER_MAJOR_k16(text) ", " text
#define FLASHINFER_MAJOR_k32(text) ""

// Operands behind the sums: A, B, whether to add to the sums, whether B is MN-major.
#define FLASHINFER_WGMMA(n, k, type, a_text, b_text, flag_text, major_text, ...)               \
  asm volatile("{\n"                                                                            \
               ".reg .pred accumulate;\n"                                                       \
               "setp.ne.b32 accumulate, %" flag_text ", 0;\n"                                   \
               "wgmma.mma_async.sync.aligned.m64n" #n #k ".f32." type "." type                  \
               " {" FLASHINFER_SUMS_##n "}, " a_text ", %" b_text ", accumulate, 1, 1"           \
               FLASHINFER_MAJOR_##k(major_text) ";\n"                                                            \
               "}"                                                                              \
               : FLASHINFER_OUTPUTS_##n(d)                                                      \
               : __VA_ARGS__, "l"(b), "r"(static_cast<int>(accumulate)), "n"(int{kTransposeB}))

#define FLASHINFER_WGMMA_OF(n, k, type, a0, a1, a2, a3, a4, a5, a6)                               \
  if constexpr (std::is_same_v<A, uint64_t>) {                                                 \
    FLASHINFER_WGMMA(n, k, type, "%" a0, a1, a2, "0, %" a3, "l"(a));                               \
  } else {                                                                                     \
    FLASHINFER_WGMMA(n, k, type, "{%" a0 ", %" a1 ", %" a2 ", %" a3 "}", a4, a5, "%" a6,           \
                     "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                               \
  }

#define FLASHINFER_WGMMA_SIZES(k, type)                                                           \
  if constexpr (kTiles == 8) {                                                                 \
    FLASHINFER_WGMMA_OF(64, k, type, "32", "33", "34", "35", "36", "37", "38")                     \
  } else if constexpr (kTiles == 12) {                                                         \
    FLASHINFER_WGMMA_OF(96, k, type, "48", "49", "50", "51", "52", "53", "54")                     \
  } else {                                                                                     \
    static_assert(kTiles == 16);                                                               \
    FLASHINFER_WGMMA_OF(128, k, type, "64", "65", "66", "67", "68", "69", "70")                    \
  }

// d = a b, or d + a b, over 32 bytes of k. `A`: a descriptor of K-major rows, or uint32_t[4], an A
// fragment of mma.m16n8k16 (8 bits: k32) for the warp's 16 rows. d[j] is C fragment j of mma.m16n8.
template <typename T, bool kTransposeB, int kTiles, typename A>
__device__ __forceinline__ void wgmma(float (&d)[kTiles][4], const A& a, uint64_t b,
                                      bool accumulate) {
  if constexpr (std::is_same_v<T, dtype::bfloat16>) {
    FLASHINFER_WGMMA_SIZES(k16, "bf16")
  } else if constexpr (std::is_same_v<T, dtype::float16>) {
    FLASHINFER_WGMMA_SIZES(k16, "f16")
  } else {
    static_assert(std::is_same_v<T, dtype::float8_e4m3fn> && !kTransposeB);
    FLASHINFER_WGMMA_SIZES(k32, "e4m3")
  }
}
// clang-format on

#undef FLASHINFER_SUM
#undef FLASHINFER_SUMS_64
#undef FLASHINFER_SUMS_96
#undef FLASHINFER_SUMS_128
#undef FLASHINFER_OUTPUTS_64
#undef FLASHINFER_OUTPUTS_96
#undef FLASHINFER_OUTPUTS_128
#undef FLASHINFER_MAJOR_k16
#undef FLASHINFER_MAJOR_k32
#undef FLASHINFER_WGMMA
#undef FLASHINFER_WGMMA_OF
#undef FLASHINFER_WGMMA_SIZES

}  // namespace flashinfer::ptx
