// Turns the logits of the query rows that a thread holds into weights: the online softmax. Logits
// lie in registers as the C fragments of mma.
#pragma once

#include <flashinfer/attention/math.cuh>
#include <flashinfer/attention/state.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>

namespace flashinfer {

template <typename Traits>
class RowWeights {
  using Tile = typename Traits::Tile;
  using Variant = typename Traits::Variant;

 public:
  using Logits = float[Tile::kRowTiles][Tile::kTokenTiles][4];
  using Scales = float[Tile::kRowTiles][2];
  using Weights = WeightRange<Tile>;

  // Finishes the sums after the last key: the lanes that hold a row's tokens have parts of its sum.
  __device__ __forceinline__ static void end(WarpState<Tile>& state) {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (state.largest[i][h] == kNothingSeen) state.largest[i][h] = -math::inf;
        for (int offset = kFirstLane; offset < kEndLane; offset *= 2) {
          state.sum[i][h] += __shfl_xor_sync(0xffffffffu, state.sum[i][h], offset);
        }
      }
    }
  }

  // Updates each row's largest exponent. It may lag, since the sums have room for that, so most
  // tiles of a long row change nothing. Returns true if any row of the warp grew; the earlier sums
  // must then be multiplied by `shrink`.
  __device__ __forceinline__ static bool update_largest(WarpState<Tile>& state,
                                                        const Logits& logits, const Scales& scale,
                                                        float (&shrink)[Tile::kRowTiles][2]) {
    if constexpr (Tile::kSplitKV) {
      // A row grows if any lane's part of it does; decode thus needs no reduction over the lanes.
      bool grow = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = lane_largest<Tile::kTokenTiles>(logits[0], h);
        grow |= Weights::grow(state.largest[0][h], largest * scale[0][h]);
      }
      if (!__any_sync(0xffffffffu, grow)) return false;
    }
    bool changes = false;
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float previous = state.largest[i][h];
        const float largest = row_largest<Tile::kTokenTiles>(logits[i], h);
        if (Weights::grow(previous, largest * scale[i][h])) {
          state.largest[i][h] = largest * scale[i][h] - Weights::kFirst;
        }
        shrink[i][h] = math::ptx_exp2(previous - state.largest[i][h]);
        changes |= state.largest[i][h] != previous;
      }
    }
    return __any_sync(0xffffffffu, changes);
  }

  // Largest of this lane's logits in the first `kTiles` token tiles.
  template <int kTiles>
  __device__ __forceinline__ static float lane_largest(const float (&logits)[Tile::kTokenTiles][4],
                                                       int h) {
    float largest = fmaxf(logits[0][2 * h], logits[0][2 * h + 1]);
#pragma unroll
    for (int j = 1; j < kTiles; ++j) {
      largest = fmaxf(largest, fmaxf(logits[j][2 * h], logits[j][2 * h + 1]));
    }
    return largest;
  }
  // Largest over all lanes of the row.
  template <int kTiles>
  __device__ __forceinline__ static float row_largest(const float (&logits)[Tile::kTokenTiles][4],
                                                      int h) {
    float largest = lane_largest<kTiles>(logits, h);
#pragma unroll
    for (int offset = kFirstLane; offset < kEndLane; offset *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    return largest;
  }

  __device__ __forceinline__ static void shrink_sums(WarpState<Tile>& state,
                                                     const float (&shrink)[Tile::kRowTiles][2]) {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
      for (int h = 0; h < 2; ++h) state.sum[i][h] *= shrink[i][h];
    }
  }

  __device__ __forceinline__ static void shrink_output(WarpState<Tile>& state,
                                                       const float (&shrink)[Tile::kRowTiles][2]) {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
      float factor[4] = {shrink[i][0], shrink[i][0], shrink[i][1], shrink[i][1]};
      if constexpr (Tile::kNarrow) factor[1] = shrink[i][1], factor[2] = shrink[i][0];
#pragma unroll
      for (int j = 0; j < Tile::kOutputTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.output[i][j][e] *= factor[e];
      }
    }
  }

  // Turns the logits of tokens 16 * step ... + 15 into weights, and adds these to the sums.
  __device__ __forceinline__ static void weigh(WarpState<Tile>& state, Logits& logits, int step,
                                               const Scales& scale) {
    if constexpr (Variant::use_softmax) {
#pragma unroll
      for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2 * kTilesOfStep; ++r) {
          float (&tile)[4] = logits[i][kTilesOfStep * step + r / 2];
          const int h = r % 2;
          float &a = tile[2 * h], &b = tile[2 * h + 1];
          a = math::ptx_exp2(fmaf(a, scale[i][h], -state.largest[i][h]));
          b = math::ptx_exp2(fmaf(b, scale[i][h], -state.largest[i][h]));
          state.sum[i][h] += a + b;
        }
      }
    }
  }

  // Packs the weights of these tokens as A fragments, or as a B fragment for narrow tiles.
  __device__ __forceinline__ static void pack(const Logits& logits, int step,
                                              uint32_t (&p)[Tile::kRowTiles][4]) {
    using Pair = PackedPair<typename Tile::Mma>;
    if constexpr (Tile::kNarrow) {
      // A pair of logits holds two rows of one token, and a pair of weights one row of two tokens.
      const float (&tile)[4] = logits[0][step];
      for (int r = 0; r < 2; ++r) p[0][r] = ptx::movmatrix_trans(Pair::pack(tile[r], tile[2 + r]));
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int first = r % 2 * 2;
          const float* const pair = logits[i][2 * step + r / 2] + first;
          p[i][r] = Pair::pack(pair[0], pair[1]);
        }
      }
    }
  }

 protected:
  // Tiles of logits that 16 tokens have.
  static constexpr int kTilesOfStep = Tile::kNarrow ? 1 : 2;
  // Bits of the lane number that distinguish the lanes of one row.
  static constexpr int kFirstLane = Tile::kNarrow ? 4 : 1;
  static constexpr int kEndLane = Tile::kNarrow ? 32 : 4;

  // Exponent of a row that has seen no key. It is finite, so that a hidden logit of -inf gets the
  // weight 2^(-inf) = 0, and below that of any visible key.
  static constexpr float kNothingSeen = -3.4028234663852886e38f;
};

}  // namespace flashinfer
