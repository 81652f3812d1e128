// Query rows of the MLA kernel for few rows of 8 bits, in shared memory as operands of wgmma.
//
// Keys are multiplied as they are, so queries must have their type. A query row is a sum of rows of
// that type: the query rounded, and in units smaller by the bits of the type, what is left, rounded
// again. Two e4m3 values make a bfloat16 value, three a float16 value.
#pragma once

#include <flashinfer/common/float8.cuh>
#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/mla_params.h>
#include <flashinfer/mla/row_end.cuh>
#include <flashinfer/mla/sm90/narrow/tile.cuh>

namespace flashinfer {

// The operand's row of a term of a query row. Columns 2t, 2t + 1 of each eight of the product come
// to a thread, which so gets all terms of the rows 2t, 2t + 1 of each eight.
template <int kTerms>
__device__ __forceinline__ int mla_operand_row(int row, int term) {
  const int value = (row / 8 * 2 + row % 2) * kTerms + term;
  return value / 2 * 8 + row % 8 / 2 * 2 + value % 2;
}

template <typename Tile>
class MlaNarrowQueries {
  using Q = typename Tile::Q;
  using Kpe = typename Tile::Kpe;
  static constexpr int kRowThreads = Tile::kMathThreads / Tile::kRows;
  static constexpr int kPiece = 8;  // columns that a thread has at once
  static constexpr int kPieces = Tile::kDimCkv / kPiece / kRowThreads;
  static constexpr int kRopeLanes = Tile::kDimKpe / kPiece;  // threads of a row that have some
  static_assert(kRowThreads == 16 && kRopeLanes <= kRowThreads);

 public:
  // Called by all threads that multiply, which see the queries after a barrier. Rows beyond
  // `num_rows` are zeros.
  __device__ __forceinline__ static void load(const MlaParams& params, const MlaWorkItem& item,
                                              int first_row, int num_rows, char* shared,
                                              MlaNarrowControl<Tile>& control) {
    const int row = threadIdx.x / kRowThreads, part = threadIdx.x % kRowThreads;
    const bool exists = first_row + row < num_rows;
    const MlaRowPlace place(params, item.qo_begin, item.row_begin + (exists ? first_row + row : 0));
    const auto source = [&](const MlaRows& rows) {
      return static_cast<const Q*>(rows.data) + place.token * rows.stride_token +
             place.head * rows.stride_head + part * kPiece;
    };
    float values[kPieces][kPiece], rope[kPiece] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      load_piece(source(params.q_nope) + i * kRowThreads * kPiece, exists, values[i]);
    }
    const bool has_rope = part < kRopeLanes;
    if (has_rope) load_piece(source(params.q_pe), exists, rope);

    float largest = 0.f, largest_rope = 0.f;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) largest = fmaxf(largest, fabsf(values[i][k]));
      largest_rope = fmaxf(largest_rope, fabsf(rope[k]));
    }
#pragma unroll
    for (int distance = 1; distance < kRowThreads; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      largest_rope = fmaxf(largest_rope, __shfl_xor_sync(0xffffffffu, largest_rope, distance));
    }
    const Scale scale(largest), rope_scale(largest_rope);
    if (part == 0) {
      control.scales[row] = scale.inverse * params.sm_scale_log2;
      control.rope_scales[row] = rope_scale.inverse * params.sm_scale_log2 * params.rope_factor;
    }

#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int column = (i * kRowThreads + part) * kPiece;
      char* const chunk =
          shared + Tile::kOffsetQueries + column / 128 * Tile::kQueryChunkBytes + column % 16;
      store_terms<typename Tile::Ckv, Tile::kTerms>(values[i], scale.factor, row, [&](int at) {
        return chunk + swizzled_offset<0>(at, column % 128 / 16);
      });
    }
    if (has_rope) {
      char* const target = shared + Tile::kOffsetRopeQueries;
      store_terms<Kpe, Tile::kRopeTerms>(rope, rope_scale.factor, row, [&](int at) {
        if constexpr (sizeof(Kpe) == 2) return target + swizzled_offset<0>(at, part);
        return target + swizzled_offset_64(at, part / 2) + part % 2 * 8;
      });
    }
  }

 private:
  // Rows are multiplied by a power of two each, so that none is too large or too small for the
  // keys' type: their largest value gets the exponent 7.
  struct Scale {
    float factor, inverse;

    __device__ __forceinline__ explicit Scale(float largest) {
      const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 8u), 253u);
      factor = __uint_as_float((261 - exponent) << 23);
      inverse = __uint_as_float((exponent - 7) << 23);
      if (largest == math::inf) inverse = __uint_as_float(0x7fc00000);  // NaN
    }
  };

  __device__ __forceinline__ static void load_piece(const Q* source, bool exists,
                                                    float (&values)[kPiece]) {
    using Words = std::conditional_t<sizeof(Q) == 1, uint2, uint4>;
    Words words = {};
    if (exists) words = *reinterpret_cast<const Words*>(source);
    const auto* all = reinterpret_cast<const Q*>(&words);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) values[k] = to_float(all[k]);
  }

  template <typename Key, int kTerms, typename Target>
  __device__ __forceinline__ static void store_terms(float (&values)[kPiece], float factor, int row,
                                                     const Target& target) {
    constexpr float kStep = 1 << kMlaBits<Key>;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) values[k] *= factor;
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      alignas(16) Key rounded[kPiece];
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        rounded[k] = from_float<Key>(values[k]);
        values[k] = (values[k] - to_float(rounded[k])) * kStep;
      }
      using Words = std::conditional_t<sizeof(Key) == 1, uint2, uint4>;
      *reinterpret_cast<Words*>(target(mla_operand_row<kTerms>(row, term))) =
          *reinterpret_cast<const Words*>(rounded);
    }
  }
};

}  // namespace flashinfer
