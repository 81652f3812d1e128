// Vector<T, N>: N consecutive elements moved by accesses of at most 16 bytes and converted to and
// from float.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>

namespace flashinfer {

namespace detail {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

}  // namespace detail

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
  static constexpr int kBytes = static_cast<int>(sizeof(T)) * N;
  static constexpr int kAccessBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kNumAccesses = kBytes / kAccessBytes;
  using Word = typename detail::WordOf<kAccessBytes>::type;

  union {
    Word words[kNumAccesses];
    T elements[N];
  };

  // NVRTC keeps the zeros of `= {}` in global memory, and kernels load them.
  __device__ __forceinline__ void clear() {
#ifdef __CUDACC_RTC__
#pragma unroll
    for (int i = 0; i < kNumAccesses; ++i) words[i] = Word{};
#else
    *this = {};
#endif
  }

  // `address` must be aligned to kAccessBytes.
  __device__ __forceinline__ void load(const T* address) {
#pragma unroll
    for (int i = 0; i < kNumAccesses; ++i) words[i] = reinterpret_cast<const Word*>(address)[i];
  }

  __device__ __forceinline__ void store(T* address) const {
#pragma unroll
    for (int i = 0; i < kNumAccesses; ++i) reinterpret_cast<Word*>(address)[i] = words[i];
  }

  // Access to data that is not used again soon: its lines leave L2 first (ld.global.cs,
  // st.global.cs).
  __device__ __forceinline__ void load_streaming(const T* address) {
#pragma unroll
    for (int i = 0; i < kNumAccesses; ++i) {
      words[i] = __ldcs(reinterpret_cast<const Word*>(address) + i);
    }
  }

  __device__ __forceinline__ void store_streaming(T* address) const {
#pragma unroll
    for (int i = 0; i < kNumAccesses; ++i) {
      __stcs(reinterpret_cast<Word*>(address) + i, words[i]);
    }
  }

  __device__ __forceinline__ float operator[](int i) const { return to_float(elements[i]); }

  // Converts all elements. After from_floats this takes fewer instructions than single elements:
  // the compiler keeps the words whole.
  __device__ __forceinline__ void to_floats(float (&values)[N]) const {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
      const auto* pairs = reinterpret_cast<const uint32_t*>(elements);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        values[2 * i] = to_float(T{static_cast<uint16_t>(pairs[i])});
        values[2 * i + 1] = to_float(T{static_cast<uint16_t>(pairs[i] >> 16)});
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = to_float(elements[i]);
    }
  }

  __device__ __forceinline__ void from_floats(const float (&values)[N]) {
    if constexpr (sizeof(T) == 4 || N == 1) {
#pragma unroll
      for (int i = 0; i < N; ++i) elements[i] = from_float<T>(values[i]);
    } else {
      using Pair = PackedPair<T>;
      auto* pairs = reinterpret_cast<typename Pair::Bits*>(elements);
#pragma unroll
      for (int i = 0; i < N; i += 2) pairs[i / 2] = Pair::pack(values[i], values[i + 1]);
    }
  }
};

}  // namespace flashinfer
