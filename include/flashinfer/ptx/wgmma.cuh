// Products of a warpgroup (wgmma, sm_90a): 64 rows of A times N columns of B, summed in registers.
// They run asynchronously from wgmma_commit() to the wgmma_wait() that covers them; until then
// neither the sums nor A's registers may be touched.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>
#include <type_traits>

namespace flashinfer::ptx {

// Required before the first product that reads registers written by ordinary instructions.
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

// Follows the wait and keeps the compiler from reading sums before it.
template <int kTiles>
__device__ __forceinline__ void wgmma_done(float (&d)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
  }
}

// The same for fragments of A. Otherwise the compiler could reuse their registers before the wait,
// and would then move the wait up to there.
template <int kSteps>
__device__ __forceinline__ void wgmma_done(uint32_t (&a)[kSteps][1][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    asm volatile("" : "+r"(a[i][0][0]), "+r"(a[i][0][1]), "+r"(a[i][0][2]), "+r"(a[i][0][3]));
  }
}

// Describes an operand in shared memory whose rows are 128 bytes with the 128-byte swizzle: chunk c
// of 16 bytes of row r lies at chunk c ^ (r % 8); the operand starts at a multiple of 1024 bytes.
// `address` advances by 32 bytes (K-major) or two groups (MN-major) per step of 16 along k.
// `chunk_stride` is the distance in bytes between blocks of 64 columns of an MN-major operand, and
// `group_stride` the distance between groups of eight rows. 8-bit operands are K-major and take 32
// bytes per step of 32.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, uint32_t chunk_stride = 0,
                                                  uint32_t group_stride = 1024) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(group_stride >> 4) << 32 |
         static_cast<uint64_t>(chunk_stride >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// The same for K-major rows of 64 bytes with the 64-byte swizzle: chunk c of 16 bytes of row r lies
// at chunk c ^ (r / 2 % 4); the operand starts at a multiple of 512 bytes.
__device__ __forceinline__ uint64_t wgmma_operand_64(uint32_t address) {
  constexpr uint64_t kSwizzle64 = uint64_t{2} << 62, kGroupStride = uint64_t{512 >> 4} << 32;
  return kSwizzle64 | kGroupStride | (address & 0x3ffff) >> 4;
}

// The same operand `bytes` later: only its address changes.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t operand, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(operand) + (bytes >> 4);
  return (operand >> 32 << 32) | low;
}

// clang-format off
// Texts and operands of the sums, for as many tiles of eight columns.
#define FLASHINFER_SUM(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FLASHINFER_SUMS_1 "%0, %1, %2, %3"
#define FLASHINFER_SUMS_2 FLASHINFER_SUMS_1 ", %4, %5, %6, %7"
#define FLASHINFER_SUMS_3 FLASHINFER_SUMS_2 ", %8, %9, %10, %11"
#define FLASHINFER_SUMS_4 FLASHINFER_SUMS_3 ", %12, %13, %14, %15"
#define FLASHINFER_SUMS_5 FLASHINFER_SUMS_4 ", %16, %17, %18, %19"
#define FLASHINFER_SUMS_6 FLASHINFER_SUMS_5 ", %20, %21, %22, %23"
#define FLASHINFER_SUMS_7 FLASHINFER_SUMS_6 ", %24, %25, %26, %27"
#define FLASHINFER_SUMS_8 FLASHINFER_SUMS_7 ", %28, %29, %30, %31"
#define FLASHINFER_SUMS_9 FLASHINFER_SUMS_8 ", %32, %33, %34, %35"
#define FLASHINFER_SUMS_10 FLASHINFER_SUMS_9 ", %36, %37, %38, %39"
#define FLASHINFER_SUMS_11 FLASHINFER_SUMS_10 ", %40, %41, %42, %43"
#define FLASHINFER_SUMS_12 FLASHINFER_SUMS_11 ", %44, %45, %46, %47"
#define FLASHINFER_SUMS_13 FLASHINFER_SUMS_12 ", %48, %49, %50, %51"
#define FLASHINFER_SUMS_14 FLASHINFER_SUMS_13 ", %52, %53, %54, %55"
#define FLASHINFER_SUMS_15 FLASHINFER_SUMS_14 ", %56, %57, %58, %59"
#define FLASHINFER_SUMS_16 FLASHINFER_SUMS_15 ", %60, %61, %62, %63"
#define FLASHINFER_SUMS_17 FLASHINFER_SUMS_16 ", %64, %65, %66, %67"
#define FLASHINFER_SUMS_18 FLASHINFER_SUMS_17 ", %68, %69, %70, %71"
#define FLASHINFER_SUMS_19 FLASHINFER_SUMS_18 ", %72, %73, %74, %75"
#define FLASHINFER_SUMS_20 FLASHINFER_SUMS_19 ", %76, %77, %78, %79"
#define FLASHINFER_SUMS_21 FLASHINFER_SUMS_20 ", %80, %81, %82, %83"
#define FLASHINFER_SUMS_22 FLASHINFER_SUMS_21 ", %84, %85, %86, %87"
#define FLASHINFER_SUMS_23 FLASHINFER_SUMS_22 ", %88, %89, %90, %91"
#define FLASHINFER_SUMS_24 FLASHINFER_SUMS_23 ", %92, %93, %94, %95"
#define FLASHINFER_SUMS_25 FLASHINFER_SUMS_24 ", %96, %97, %98, %99"
#define FLASHINFER_SUMS_26 FLASHINFER_SUMS_25 ", %100, %101, %102, %103"
#define FLASHINFER_SUMS_27 FLASHINFER_SUMS_26 ", %104, %105, %106, %107"
#define FLASHINFER_SUMS_28 FLASHINFER_SUMS_27 ", %108, %109, %110, %111"
#define FLASHINFER_SUMS_29 FLASHINFER_SUMS_28 ", %112, %113, %114, %115"
#define FLASHINFER_SUMS_30 FLASHINFER_SUMS_29 ", %116, %117, %118, %119"
#define FLASHINFER_SUMS_31 FLASHINFER_SUMS_30 ", %120, %121, %122, %123"
#define FLASHINFER_SUMS_32 FLASHINFER_SUMS_31 ", %124, %125, %126, %127"
#define FLASHINFER_OUTPUTS_1(d) FLASHINFER_SUM(d, 0)
#define FLASHINFER_OUTPUTS_2(d) FLASHINFER_OUTPUTS_1(d), FLASHINFER_SUM(d, 1)
#define FLASHINFER_OUTPUTS_3(d) FLASHINFER_OUTPUTS_2(d), FLASHINFER_SUM(d, 2)
#define FLASHINFER_OUTPUTS_4(d) FLASHINFER_OUTPUTS_3(d), FLASHINFER_SUM(d, 3)
#define FLASHINFER_OUTPUTS_5(d) FLASHINFER_OUTPUTS_4(d), FLASHINFER_SUM(d, 4)
#define FLASHINFER_OUTPUTS_6(d) FLASHINFER_OUTPUTS_5(d), FLASHINFER_SUM(d, 5)
#define FLASHINFER_OUTPUTS_7(d) FLASHINFER_OUTPUTS_6(d), FLASHINFER_SUM(d, 6)
#define FLASHINFER_OUTPUTS_8(d) FLASHINFER_OUTPUTS_7(d), FLASHINFER_SUM(d, 7)
#define FLASHINFER_OUTPUTS_9(d) FLASHINFER_OUTPUTS_8(d), FLASHINFER_SUM(d, 8)
#define FLASHINFER_OUTPUTS_10(d) FLASHINFER_OUTPUTS_9(d), FLASHINFER_SUM(d, 9)
#define FLASHINFER_OUTPUTS_11(d) FLASHINFER_OUTPUTS_10(d), FLASHINFER_SUM(d, 10)
#define FLASHINFER_OUTPUTS_12(d) FLASHINFER_OUTPUTS_11(d), FLASHINFER_SUM(d, 11)
#define FLASHINFER_OUTPUTS_13(d) FLASHINFER_OUTPUTS_12(d), FLASHINFER_SUM(d, 12)
#define FLASHINFER_OUTPUTS_14(d) FLASHINFER_OUTPUTS_13(d), FLASHINFER_SUM(d, 13)
#define FLASHINFER_OUTPUTS_15(d) FLASHINFER_OUTPUTS_14(d), FLASHINFER_SUM(d, 14)
#define FLASHINFER_OUTPUTS_16(d) FLASHINFER_OUTPUTS_15(d), FLASHINFER_SUM(d, 15)
#define FLASHINFER_OUTPUTS_17(d) FLASHINFER_OUTPUTS_16(d), FLASHINFER_SUM(d, 16)
#define FLASHINFER_OUTPUTS_18(d) FLASHINFER_OUTPUTS_17(d), FLASHINFER_SUM(d, 17)
#define FLASHINFER_OUTPUTS_19(d) FLASHINFER_OUTPUTS_18(d), FLASHINFER_SUM(d, 18)
#define FLASHINFER_OUTPUTS_20(d) FLASHINFER_OUTPUTS_19(d), FLASHINFER_SUM(d, 19)
#define FLASHINFER_OUTPUTS_21(d) FLASHINFER_OUTPUTS_20(d), FLASHINFER_SUM(d, 20)
#define FLASHINFER_OUTPUTS_22(d) FLASHINFER_OUTPUTS_21(d), FLASHINFER_SUM(d, 21)
#define FLASHINFER_OUTPUTS_23(d) FLASHINFER_OUTPUTS_22(d), FLASHINFER_SUM(d, 22)
#define FLASHINFER_OUTPUTS_24(d) FLASHINFER_OUTPUTS_23(d), FLASHINFER_SUM(d, 23)
#define FLASHINFER_OUTPUTS_25(d) FLASHINFER_OUTPUTS_24(d), FLASHINFER_SUM(d, 24)
#define FLASHINFER_OUTPUTS_26(d) FLASHINFER_OUTPUTS_25(d), FLASHINFER_SUM(d, 25)
#define FLASHINFER_OUTPUTS_27(d) FLASHINFER_OUTPUTS_26(d), FLASHINFER_SUM(d, 26)
#define FLASHINFER_OUTPUTS_28(d) FLASHINFER_OUTPUTS_27(d), FLASHINFER_SUM(d, 27)
#define FLASHINFER_OUTPUTS_29(d) FLASHINFER_OUTPUTS_28(d), FLASHINFER_SUM(d, 28)
#define FLASHINFER_OUTPUTS_30(d) FLASHINFER_OUTPUTS_29(d), FLASHINFER_SUM(d, 29)
#define FLASHINFER_OUTPUTS_31(d) FLASHINFER_OUTPUTS_30(d), FLASHINFER_SUM(d, 30)
#define FLASHINFER_OUTPUTS_32(d) FLASHINFER_OUTPUTS_31(d), FLASHINFER_SUM(d, 31)

// Only 16-bit operands may be MN-major.
#define FLASHINFER_MAJOR_k16(text) ", " text
#define FLASHINFER_MAJOR_k32(text) ""

// Operands after the sums: A, B, whether to add to the sums, whether B is MN-major.
#define FLASHINFER_WGMMA(tiles, n, k, types, a_text, b_text, flag_text, major_text, ...)       \
  asm volatile("{\n"                                                                           \
               ".reg .pred accumulate;\n"                                                      \
               "setp.ne.b32 accumulate, %" flag_text ", 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n" #n #k ".f32." types                         \
               " {" FLASHINFER_SUMS_##tiles "}, " a_text ", %" b_text ", accumulate, 1, 1"     \
               FLASHINFER_MAJOR_##k(major_text) ";\n"                                          \
               "}"                                                                             \
               : FLASHINFER_OUTPUTS_##tiles(d)                                                 \
               : __VA_ARGS__, "l"(b), "r"(static_cast<int>(accumulate)), "n"(int{kTransposeB}))

#define FLASHINFER_WGMMA_OF(tiles, n, k, types, a0, a1, a2, a3, a4, a5, a6)                     \
  if constexpr (kTiles == tiles && std::is_same_v<A, uint64_t>) {                              \
    FLASHINFER_WGMMA(tiles, n, k, types, "%" a0, a1, a2, "0, %" a3, "l"(a));                   \
  } else if constexpr (kTiles == tiles) {                                                      \
    FLASHINFER_WGMMA(tiles, n, k, types, "{%" a0 ", %" a1 ", %" a2 ", %" a3 "}", a4, a5,       \
                     "%" a6, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                      \
  }

#define FLASHINFER_WGMMA_SIZES(k, types) \
  FLASHINFER_WGMMA_OF(1, 8, k, types, "4", "5", "6", "7", "8", "9", "10") \
  FLASHINFER_WGMMA_OF(2, 16, k, types, "8", "9", "10", "11", "12", "13", "14") \
  FLASHINFER_WGMMA_OF(3, 24, k, types, "12", "13", "14", "15", "16", "17", "18") \
  FLASHINFER_WGMMA_OF(4, 32, k, types, "16", "17", "18", "19", "20", "21", "22") \
  FLASHINFER_WGMMA_OF(5, 40, k, types, "20", "21", "22", "23", "24", "25", "26") \
  FLASHINFER_WGMMA_OF(6, 48, k, types, "24", "25", "26", "27", "28", "29", "30") \
  FLASHINFER_WGMMA_OF(7, 56, k, types, "28", "29", "30", "31", "32", "33", "34") \
  FLASHINFER_WGMMA_OF(8, 64, k, types, "32", "33", "34", "35", "36", "37", "38") \
  FLASHINFER_WGMMA_OF(10, 80, k, types, "40", "41", "42", "43", "44", "45", "46") \
  FLASHINFER_WGMMA_OF(12, 96, k, types, "48", "49", "50", "51", "52", "53", "54") \
  FLASHINFER_WGMMA_OF(14, 112, k, types, "56", "57", "58", "59", "60", "61", "62") \
  FLASHINFER_WGMMA_OF(16, 128, k, types, "64", "65", "66", "67", "68", "69", "70") \
  FLASHINFER_WGMMA_OF(18, 144, k, types, "72", "73", "74", "75", "76", "77", "78") \
  FLASHINFER_WGMMA_OF(20, 160, k, types, "80", "81", "82", "83", "84", "85", "86") \
  FLASHINFER_WGMMA_OF(22, 176, k, types, "88", "89", "90", "91", "92", "93", "94") \
  FLASHINFER_WGMMA_OF(24, 192, k, types, "96", "97", "98", "99", "100", "101", "102") \
  FLASHINFER_WGMMA_OF(26, 208, k, types, "104", "105", "106", "107", "108", "109", "110") \
  FLASHINFER_WGMMA_OF(28, 224, k, types, "112", "113", "114", "115", "116", "117", "118") \
  FLASHINFER_WGMMA_OF(30, 240, k, types, "120", "121", "122", "123", "124", "125", "126") \
  FLASHINFER_WGMMA_OF(32, 256, k, types, "128", "129", "130", "131", "132", "133", "134")

template <int kTiles>
inline constexpr bool kIsWgmmaSize = kTiles <= 8 || (kTiles <= 32 && kTiles % 2 == 0);

// d = a b, or d + a b, over 32 bytes of k. `A` is a descriptor of K-major rows, or uint32_t[4], an
// A fragment of mma.m16n8k16 (k32 for 8-bit operands) for the warp's 16 rows. d[j] is C fragment j
// of mma.m16n8. `TB`, the type of b, may differ from a's only among the 8-bit types.
template <typename T, bool kTransposeB, typename TB = T, int kTiles, typename A>
__device__ __forceinline__ void wgmma(float (&d)[kTiles][4], const A& a, uint64_t b,
                                      bool accumulate) {
  static_assert(kIsWgmmaSize<kTiles>);
  if constexpr (std::is_same_v<T, dtype::bfloat16>) {
    FLASHINFER_WGMMA_SIZES(k16, "bf16.bf16")
  } else if constexpr (std::is_same_v<T, dtype::float16>) {
    FLASHINFER_WGMMA_SIZES(k16, "f16.f16")
  } else {
    static_assert(dtype::kIsFloat8<T> && dtype::kIsFloat8<TB> && !kTransposeB);
    constexpr bool kA4 = std::is_same_v<T, dtype::float8_e4m3fn>;
    constexpr bool kB4 = std::is_same_v<TB, dtype::float8_e4m3fn>;
    if constexpr (kA4 && kB4) {
      FLASHINFER_WGMMA_SIZES(k32, "e4m3.e4m3")
    } else if constexpr (kA4) {
      FLASHINFER_WGMMA_SIZES(k32, "e4m3.e5m2")
    } else if constexpr (kB4) {
      FLASHINFER_WGMMA_SIZES(k32, "e5m2.e4m3")
    } else {
      FLASHINFER_WGMMA_SIZES(k32, "e5m2.e5m2")
    }
  }
}
// clang-format on

#undef FLASHINFER_SUM
#undef FLASHINFER_MAJOR_k16
#undef FLASHINFER_MAJOR_k32
#undef FLASHINFER_WGMMA
#undef FLASHINFER_WGMMA_OF
#undef FLASHINFER_WGMMA_SIZES

}  // namespace flashinfer::ptx
