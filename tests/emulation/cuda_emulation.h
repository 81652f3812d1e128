// CUDA C++ as far as the attention kernels use it, for a host compiler: kernels become functions
// that emulation::Block runs thread by thread. It is included before all of the product's headers.
//
// What is checked beyond results: barriers and warp collectives that not all threads reach,
// misaligned asynchronous copies, copies past the launch's shared memory, copies that nobody waits
// for, and, because shared memory begins as NaN, reads of what was not written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <vector_types.h>

#include "fibers.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static  // the CTAs take turns

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

inline constexpr size_t kMaxSharedBytes = 227 << 10;
inline size_t shared_bytes = 0;  // of the launch

// With EMULATION_CLUSTERS, the CTAs of a cluster run as threads of one block. The shared memory of
// CTA r begins at r * cta_bytes.
#if defined(EMULATION_CLUSTERS)
inline constexpr unsigned kMaxClusterCtas = 2;
#else
inline constexpr unsigned kMaxClusterCtas = 1;
#endif
inline unsigned cluster_ctas = 1;  // of the launch
inline uint32_t cta_bytes = 0;     // from one's shared memory to the next one's

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// prmt.b32: bytes of y:x by the selector's digits, whose fourth bit asks for the byte's sign.
inline uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = x | static_cast<uint64_t>(y) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 15, byte = bytes >> (8 * (digit & 7)) & 0xff;
    result |= (digit < 8 ? byte : byte & 0x80 ? 0xffu : 0u) << (8 * i);
  }
  return result;
}

// cvt.f32.f16 and cvt.rn.f16.f32.
inline float half_to_float(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  const float value = magnitude >= 0x7c00u
                          ? bit_cast<float>(0x7f800000u | (magnitude & 0x3ffu) << 13)
                          : bit_cast<float>(magnitude << 13) * 0x1p112f;
  return bits & 0x8000u ? -value : value;
}

inline uint16_t float_to_half(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000u : 0;
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return 0x7fff;
  if (magnitude >= 65520.f) return sign | 0x7c00u;
  const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
  // In units of the last place; those of a full mantissa carry into the exponent.
  const float units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + static_cast<int>(units));
}

}  // namespace emulation

alignas(1024) inline char dynamic_shared[emulation::kMaxClusterCtas *
                                         (emulation::kMaxSharedBytes + 1024)];

inline void __syncthreads() { emulation::block.wait(emulation::State::at_block_barrier); }
inline void __syncwarp() { emulation::block.wait(emulation::State::at_warp_barrier); }

template <typename T>
inline T __shfl_sync(unsigned, T value, int lane) {
  return emulation::block.exchange(value)[lane % 32];
}

template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::block.exchange(value)[emulation::block.thread() % 32 ^ mask];
}

template <typename T>
inline T __shfl_up_sync(unsigned, T value, unsigned distance) {
  const T* all = emulation::block.exchange(value);
  const unsigned lane = emulation::block.thread() % 32;
  return all[lane < distance ? lane : lane - distance];
}

template <typename T>
inline unsigned __match_any_sync(unsigned, T value) {
  const T* all = emulation::block.exchange(value);
  unsigned peers = 0;
  for (int lane = 0; lane < 32; ++lane) peers |= (all[lane] == value ? 1u : 0u) << lane;
  return peers;
}

// Fibers take turns, so that nothing comes between.
template <typename T>
inline T atomicAdd(T* address, T value) {
  const T before = *address;
  *address += value;
  return before;
}
template <typename T>
inline T atomicMax(T* address, T value) {
  const T before = *address;
  *address = std::max(before, value);
  return before;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift % 32));
}

inline bool __any_sync(unsigned, bool predicate) {
  const bool* all = emulation::block.exchange(predicate);
  return std::any_of(all, all + 32, [](bool x) { return x; });
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  const bool* all = emulation::block.exchange(predicate);
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= (all[lane] ? 1u : 0u) << lane;
  return lanes;
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const unsigned* all = emulation::block.exchange(value);
  return *std::max_element(all, all + 32);
}

inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  const unsigned* all = emulation::block.exchange(value);
  return *std::min_element(all, all + 32);
}

inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  const unsigned* all = emulation::block.exchange(value);
  unsigned sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += all[lane];
  return sum;
}

inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] inline void __trap() { emulation::fail("the program traps"); }

inline int __ffs(unsigned x) { return __builtin_ffs(x); }

inline bool __all_sync(unsigned mask, bool predicate) { return !__any_sync(mask, !predicate); }

inline void sincospif(float x, float* sin, float* cos) {
  *sin = static_cast<float>(std::sin(M_PI * x));
  *cos = static_cast<float>(std::cos(M_PI * x));
}
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline uint32_t __float_as_uint(float x) { return emulation::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return emulation::bit_cast<float>(x); }
inline float __int_as_float(int32_t x) { return emulation::bit_cast<float>(x); }

inline int32_t __viaddmax_s32(int32_t x, int32_t y, int32_t z) {
  const uint32_t sum = static_cast<uint32_t>(x) + static_cast<uint32_t>(y);  // which may wrap
  return std::max(static_cast<int32_t>(sum), z);
}
inline int32_t __float_as_int(float x) { return emulation::bit_cast<int32_t>(x); }

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  return emulation::permute_bytes(x, y, selector & 0x7777u);
}

// The larger ones of two numbers each.
inline uint32_t __vmaxu2(uint32_t x, uint32_t y) {
  return std::max(x >> 16, y >> 16) << 16 | std::max(x & 0xffffu, y & 0xffffu);
}

inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }

inline float __sinf(float x) { return std::sin(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __cosf(float x) { return std::cos(x); }

inline float __saturatef(float x) { return x > 0.f ? std::fmin(x, 1.f) : 0.f; }

inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename T>
inline T __ldg(const T* address) {
  return *address;
}
template <typename T>
inline T __ldcg(const T* address) {
  return *address;
}
template <typename T>
inline T __ldcs(const T* address) {
  return *address;
}
template <typename T>
inline void __stcs(T* address, T value) {
  *address = value;
}

template <typename T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

// Conversions in their portable forms, and no waiting for other grids: as for an old architecture.
#define __CUDA_ARCH__ 750
#include <flashinfer/common/float8.cuh>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/ptx/pdl.cuh>
#undef __CUDA_ARCH__
#define __CUDA_ARCH__ EMULATION_ARCH
