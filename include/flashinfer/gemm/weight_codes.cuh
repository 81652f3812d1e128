// Weights of 4 and 8 bits as pairs of the activations' 16-bit type. Every value is exact: codes
// have at most eight significant bits, and scales that do not fit are left to the float32 sums.
//
// Codes are unpacked eight at a time, in the order of memory (the first of two 4-bit codes is in
// the lower bits). Pair p holds elements (p, p + 4) of 4-bit floats, because one mask then takes
// two codes from a word, and elements (2p, 2p + 1) of the others. Both operands of a product need
// the same order: pair_activations() gives it to eight activations.
#pragma once

#include <cstdint>
#include <flashinfer/common/bits.cuh>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/float4_pairs.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/ptx/fma_pair.cuh>
#include <type_traits>

namespace flashinfer {

enum class WeightFormat {
  plain,  // the activations' type
  int8,   // two's complement
  int4,   // two's complement
  mxfp4,  // e2m1, a power of two for 32 elements
  nvfp4,  // e2m1, an e4m3 scale for 16 elements
};

FLASHINFER_HOST_DEVICE constexpr int weight_bits(WeightFormat format) {
  return format == WeightFormat::plain ? 16 : format == WeightFormat::int8 ? 8 : 4;
}

namespace detail {

template <typename T>
__device__ __forceinline__ uint32_t same_pair(float x) {
  return PackedPair<T>::pack(x, x);
}

}  // namespace detail

// Eight codes of `format` to four pairs of T.
template <WeightFormat format, typename T>
struct WeightCodes {
  static_assert(std::is_same_v<T, dtype::bfloat16> || std::is_same_v<T, dtype::float16>);
  static constexpr int kBits = weight_bits(format);
  static constexpr int kWords = kBits / 4;  // that hold eight codes
  static constexpr bool kIsBfloat = std::is_same_v<T, dtype::bfloat16>;
  static constexpr bool kIsFloat4 = format == WeightFormat::mxfp4 || format == WeightFormat::nvfp4;
  // Scales of nvfp4 change within the k that one instruction sums, so the pairs are multiplied by
  // them. The product, of six bits, is 2^kShift too small, so that the factor is finite.
  static constexpr bool kScalesPairs = format == WeightFormat::nvfp4;
  // Integers of four bits become numbers by a multiplication of subnormals, whose factor is finite.
  static constexpr bool kIsInt4 = format == WeightFormat::int4;
  static constexpr int kShift = kScalesPairs ? 8 : !kIsInt4 ? 0 : kIsBfloat ? 6 : 9;
  // Whether pairs are of neighbours, as the activations are in memory.
  static constexpr bool kPairsNeighbours = !kIsFloat4;

  // The signs that unpack() inverts. Loops keep it, and the factor of integers, in a register.
  static constexpr uint32_t kSigns = 0x88888888u;

  // The factor of unpack() for a scale: what turns the bits of a code into its value. Integers have
  // the same for all: 2^127 (float16: 2^15) and, for upper codes of bytes, a sixteenth.
  __device__ __forceinline__ static uint32_t factor(float scale) {
    if constexpr (kIsInt4) return kIsBfloat ? 0x7d007f00u : 0x68007800u;
    return detail::same_pair<T>(scale * (kE2m1Unit<T> * (kScalesPairs ? 0x1p-8f : 1.f)));
  }

  __device__ __forceinline__ static void unpack(const uint32_t (&words)[kWords], uint32_t factor,
                                                uint32_t signs, uint32_t (&pairs)[4]) {
    if constexpr (format == WeightFormat::plain) {
#pragma unroll
      for (int p = 0; p < 4; ++p) pairs[p] = words[p];
    } else if constexpr (format == WeightFormat::int8) {
      unpack_int8(words, pairs);
    } else if constexpr (kIsInt4) {
      unpack_int4(words[0], factor, signs, pairs);
    } else {
      unpack_e2m1(words[0], factor, pairs);
    }
  }

 private:
  // Bits 0 to 7 of a number whose other bits are zeros count units of 2^-133 (float16: 2^-24): in
  // bfloat16, the lowest bit of the exponent continues the mantissa. So codes may be in bits 0 to 3
  // or 4 to 7, each with its factor, and no shift brings both codes of a byte to their halves. With
  // its sign inverted, a code is 8 more than its value.
  __device__ __forceinline__ static void unpack_int4(uint32_t word, uint32_t factors,
                                                     uint32_t signs, uint32_t (&pairs)[4]) {
    constexpr uint32_t kMinusEight = kIsBfloat ? 0xbe00be00u : 0xa400a400u;  // times 2^-kShift
    const uint32_t lower = flip_and_mask(word, signs, 0x0f0f0f0fu);
    const uint32_t upper = flip_and_mask(word, signs, 0xf0f0f0f0u);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      // Above each code eight copies of a lower code's uppermost bit, which is zero.
      const uint32_t bits = permute_bytes(lower, upper, 0x8480u + 0x1111u * p);
      pairs[p] = ptx::fma_pair<T>(bits, factors, kMinusEight);
    }
  }

  __device__ __forceinline__ static void unpack_e2m1(uint32_t word, uint32_t factor,
                                                     uint32_t (&pairs)[4]) {
    e2m1_to_pairs<T>(word, pairs);
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = ptx::fma_pair<T>(pairs[p], factor, 0x80008000u);
  }

  // A byte with its sign bit inverted, in the mantissa of 1024 (float16) or of 2^23 (float32, then
  // rounded to bfloat16, which holds eight bits), makes that number plus 128 plus the code.
  __device__ __forceinline__ static void unpack_int8(const uint32_t (&words)[kWords],
                                                     uint32_t (&pairs)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t bytes = words[p / 2] ^ 0x80808080u;
      if constexpr (kIsBfloat) {
        float values[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t bits = __byte_perm(bytes, 0x4b000000u, 0x7440 | (p % 2 * 2 + i));
          values[i] = __uint_as_float(bits) - 8388736.f;
        }
        pairs[p] = PackedPair<T>::pack(values[0], values[1]);
      } else {
        const uint32_t bits = __byte_perm(bytes, 0x64646464u, p % 2 ? 0x4342 : 0x4140);
        pairs[p] = ptx::fma_pair<T>(bits, 0x3c003c00u, 0xe480e480u);
      }
    }
  }
};

// Eight activations in the order of the pairs of `Codes`.
template <typename Codes>
__device__ __forceinline__ uint4 pair_activations(const uint4& x) {
  if constexpr (Codes::kPairsNeighbours) return x;
  return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                    __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
}

// A scale as it is stored. The power of two of exponent 0 is subnormal, that of 255 a NaN.
__device__ __forceinline__ float scale_to_float(uint8_t e8m0) {
  const uint32_t bits = max(static_cast<uint32_t>(e8m0) << 23, 0x00400000u);
  return __uint_as_float(e8m0 == 0xff ? 0x7fc00000u : bits);
}

template <typename T>
__device__ __forceinline__ float scale_to_float(T scale) {
  return to_float(scale);
}

// The bits of a scale, and back: a conversion waits for the load, bits need not.
template <typename T>
__device__ __forceinline__ uint32_t scale_bits(const T* scale) {
  if constexpr (sizeof(T) == 1) {
    return __ldg(reinterpret_cast<const uint8_t*>(scale));
  } else if constexpr (sizeof(T) == 2) {
    return __ldg(reinterpret_cast<const uint16_t*>(scale));
  } else {
    return __ldg(reinterpret_cast<const uint32_t*>(scale));
  }
}

template <typename T>
__device__ __forceinline__ float scale_of_bits(uint32_t bits) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(bits);
  } else if constexpr (std::is_same_v<T, uint8_t>) {
    return scale_to_float(static_cast<uint8_t>(bits));
  } else if constexpr (sizeof(T) == 1) {
    return to_float(T{static_cast<uint8_t>(bits)});
  } else {
    return to_float(T{static_cast<uint16_t>(bits)});
  }
}

}  // namespace flashinfer
