// Query rows of the narrow MLA kernel, as fragments that a warp keeps in registers.
//
// A warp reads keys 16 bytes a lane at a time, so a lane has 16 neighbouring columns of a latent
// row and 16 or 8 of a rotary one. The columns of a product may be summed in any order, so each
// lane's columns are those that it multiplies: of columns c ... c + 3, step after step, the first
// two are its columns 2t, 2t + 1 of mma's A, the others 2t + 8, 2t + 9.
#pragma once

#include <flashinfer/common/float8.cuh>
#include <flashinfer/mla/mla_params.h>
#include <flashinfer/mla/sm90/narrow/tile.cuh>

namespace flashinfer {

template <typename Tile>
class MlaNarrowQueries {
  using T = typename Tile::T;
  using Q = typename Tile::Q;
  // Queries of 8 bits become float16 when they are loaded.
  using Loaded = std::conditional_t<sizeof(Q) == 1, dtype::float16, Q>;
  static constexpr int kRopeColumns = 16 / static_cast<int>(sizeof(typename Tile::Kpe));

 public:
  uint32_t ckv[Tile::kChunks][4][4];  // of 64 columns, of 16: an A fragment
  uint32_t kpe[Tile::kRopeSteps + 1][4];

  // Rows `row` and `row` + 8 of the tile, zeros beyond `num_rows`. They are multiplied by a power
  // of two each, so that none is too large or too small for T; `scales` are its inverses.
  __device__ __forceinline__ void load(const MlaParams& params, const MlaWorkItem& item, int row,
                                       int num_rows, int lane_idx, float (&scales)[2]) {
    const int t = lane_idx % 4;
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool exists = row + 8 * h < num_rows;
      const uint32_t packed = exists ? item.row_begin + row + 8 * h : item.row_begin;
      const uint32_t token = params.num_heads.divide(packed);
      const int64_t head = packed - token * params.num_heads.divisor;
      const auto first = [&](const MlaRows& rows) {
        return static_cast<const Q*>(rows.data) +
               (item.qo_begin + int64_t{token}) * rows.stride_token + head * rows.stride_head;
      };
      uint32_t nothing = 0;  // not loaded: zeros
      const uint32_t mask = exists ? ~nothing : nothing;
      const Q* nope = first(params.q_nope) + 16 * t;
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        uint32_t pairs[8];
        load_pairs(nope + 64 * chunk, pairs);
#pragma unroll
        for (int i = 0; i < 8; ++i) ckv[chunk][i / 2][i % 2 * 2 + h] = pairs[i] & mask;
      }
      if constexpr (Tile::kRopeSteps != 0) {
        constexpr int kPairs = kRopeColumns / 2;
        const Q* pe = first(params.q_pe) + kRopeColumns * t;
#pragma unroll
        for (int part = 0; part < 8 / kPairs; ++part) {
          uint32_t pairs[kPairs];
          load_pairs(pe + 4 * kRopeColumns * part, pairs);
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            kpe[part * kPairs / 2 + i / 2][i % 2 * 2 + h] = pairs[i] & mask;
          }
        }
      }
      largest[h] = find_largest(h, params.rope_factor);
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
    }
    scale(largest, params.rope_factor, scales);
  }

 private:
  template <int kPairs>
  __device__ __forceinline__ static void load_pairs(const Q* source, uint32_t (&pairs)[kPairs]) {
    constexpr int kWords = kPairs * 2 * static_cast<int>(sizeof(Q)) / 4;
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; i += kWords < 4 ? 2 : 4) {
      if constexpr (kWords < 4) {
        const uint2 loaded = *reinterpret_cast<const uint2*>(source);
        words[0] = loaded.x, words[1] = loaded.y;
      } else {
        const uint4 loaded = reinterpret_cast<const uint4*>(source)[i / 4];
        words[i] = loaded.x, words[i + 1] = loaded.y;
        words[i + 2] = loaded.z, words[i + 3] = loaded.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(Q) == 1) {
        float8_to_half2<Q>(words[i], pairs[2 * i], pairs[2 * i + 1]);
      } else {
        pairs[i] = words[i];
      }
    }
  }

  __device__ __forceinline__ static float low(uint32_t pair) {
    return to_float(Loaded{static_cast<uint16_t>(pair)});
  }
  __device__ __forceinline__ static float high(uint32_t pair) {
    return to_float(Loaded{static_cast<uint16_t>(pair >> 16)});
  }

  // The largest of the lane's columns of row `h`.
  __device__ __forceinline__ float find_largest(int h, float rope_factor) const {
    float largest = 0.f, of_rope = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < 8; ++i) add_to(largest, ckv[chunk][i / 2][i % 2 * 2 + h]);
    }
#pragma unroll
    for (int i = 0; i < 2 * Tile::kRopeSteps; ++i) add_to(of_rope, kpe[i / 2][i % 2 * 2 + h]);
    return fmaxf(largest, of_rope * fabsf(rope_factor));
  }
  __device__ __forceinline__ static void add_to(float& largest, uint32_t pair) {
    largest = fmaxf(largest, fmaxf(fabsf(low(pair)), fabsf(high(pair))));
  }

  __device__ __forceinline__ void scale(const float (&largest)[2], float rope_factor,
                                        float (&scales)[2]) {
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // The largest value gets the exponent 14, of float16's 15.
      const uint32_t exponent = min(max(__float_as_uint(largest[h]) >> 23, 15u), 253u);
      factors[h] = __uint_as_float((268 - exponent) << 23);
      scales[h] = __uint_as_float((exponent - 14) << 23);
    }
    const auto convert = [](uint32_t& pair, float factor) {
      pair = PackedPair<T>::pack(low(pair) * factor, high(pair) * factor);
    };
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < 16; ++i) convert(ckv[chunk][i / 4][i % 4], factors[i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 4 * Tile::kRopeSteps; ++i) {
      uint32_t& pair = kpe[i / 4][i % 4];
      pair = PackedPair<T>::pack(low(pair) * rope_factor * factors[i % 2],
                                 high(pair) * rope_factor * factors[i % 2]);
    }
  }
};

}  // namespace flashinfer
