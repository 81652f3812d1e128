// Weights, from a warp's logits, in the attention kernel for Hopper.
//
// A row's largest logit seldom grows, and to look for it takes a sixth of a tile's instructions. So
// exponentials are taken against the largest so far, and a lane's sums of them tell afterwards
// whether one may be more than it should, or most of its row: then, and in an item's first tile,
// the row's largest is looked for and the weights are made again. Logits stay as they are until
// then. Rows that did not ask keep what they have, bit for bit: a tile's last rows may be another
// request's.
#pragma once

#include <flashinfer/attention/rows.cuh>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

template <typename Traits, typename Params>
class HopperWeights {
  using Tile = typename Traits::Tile;
  using Rows = TileRows<Traits, Params>;
  using State = WarpState<Tile>;
  using Logits = float[1][Tile::kTokenTiles][4];
  static constexpr bool kProductsAre8Bit = Tile::kProductsAre8Bit;
  static constexpr int kSteps = Tile::kTileKV / Tile::kStepTokens;
  // What a lane's sum may be: of a tile's 16 bits, or of a step's 8 bits, of which it is the
  // largest number.
  static constexpr float kMost = kProductsAre8Bit ? 448.f : 512.f;
  // The largest weight of a row, when it has been looked for, is two to this. 8 bits hold 2^-9 to
  // 448: more room to grow would take the small weights' last bits (3 failed the fuzzer), and with
  // less the sum of a step's equal weights, eight in a lane, would ask at each tile.
  static constexpr float kHeadroom = kProductsAre8Bit ? 5.f : 0.f;
  // A weight that is most of its row should be the one that needs no rounding. So of 16 bits the
  // largest is looked for, too, where a lane's sum is more than so many times what it had before,
  // and so much more; without it the largest error of such rows was up to 1.9 times that of weights
  // against the largest. Normal queries and keys hardly ever ask. Of 8 bits the question costs five
  // registers more than there are.
  static constexpr float kPeak = 4.f, kFewLargest = 4.f;
  static_assert(kProductsAre8Bit ? 8 * 32 < kMost : Tile::kTokenTiles * 2 < kMost);

 public:
  // Makes `p` of the logits of the tile's first `kTiles` of tokens and adds the weights to the
  // rows' sums. Registers of `p` are written behind finish_values(), which waits for the product
  // that reads them.
  template <bool kFirst, int kTiles, typename FinishValues>
  __device__ __forceinline__ static void weigh(State& state, const Logits& logits,
                                               const float (&scale)[2], uint32_t (&p)[kSteps][1][4],
                                               const FinishValues& finish_values) {
    constexpr int kTileSteps = kTiles * 8 / Tile::kStepTokens;
    float sum[2] = {0.f, 0.f};
    bool fits[2] = {true, true};  // of the lane's two rows
    if constexpr (kFirst) {
      grow<true, kTiles>(state, logits, scale, fits);
      finish_values();
      make<0, kTileSteps>(state, logits, scale, p, sum, fits);
    } else {
      uint32_t ahead[kSteps][1][4];  // of which the first are used
      make<0, kAhead>(state, logits, scale, ahead, sum, fits);
      // Asked now, too, since the compiler keeps the wait behind a vote: else it stands in front.
      bool all_fit = true;
      if constexpr (kAhead > 0) all_fit = __all_sync(0xffffffffu, fits[0] && fits[1]);
      finish_values();
      make<kAhead, kTileSteps>(state, logits, scale, p, sum, fits);
      if constexpr (!kProductsAre8Bit) tile_fits(state, sum, fits);
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        // As instructions of their own: else the compiler would write `p` at once.
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          asm volatile("mov.b32 %0, %1;" : "=r"(p[step][0][r]) : "r"(ahead[step][0][r]));
        }
      }
      all_fit = all_fit && fits[0] && fits[1];
      if (__builtin_expect(__any_sync(0xffffffffu, !all_fit), false)) {
        grow<false, kTiles>(state, logits, scale, fits);
        sum[0] = sum[1] = 0.f;
        make<0, kTileSteps>(state, logits, scale, p, sum, fits);
      }
    }
    state.sum[0][0] += sum[0];
    state.sum[0][1] += sum[1];
  }

 private:
  // Steps whose weights are made while p v is under way. Of 16 bits the compiler finds no registers
  // for them but those of `p`, and so waits first.
  static constexpr int kAhead = kProductsAre8Bit ? 1 : 0;

  // Of 16 bits; not if a sum is NaN.
  __device__ __forceinline__ static void tile_fits(const State& state, const float (&sum)[2],
                                                   bool (&fits)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      fits[h] = sum[h] <= kMost && fmaf(-kPeak, state.sum[0][h], sum[h]) <= kFewLargest;
    }
  }

  // The largest exponents with these logits of the rows that do not fit, and what was summed so far
  // to match.
  template <bool kFirst, int kTiles>
  __device__ __forceinline__ static void grow(State& state, const Logits& logits,
                                              const float (&scale)[2], const bool (&fits)[2]) {
    float shrink[1][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = Rows::template row_largest<kTiles>(logits[0], h);
      float grown = fmaxf(state.largest[0][h], largest * scale[h] - kHeadroom);
      if (!kFirst && row_fits(fits[h])) grown = state.largest[0][h];
      shrink[0][h] = math::ptx_exp2(state.largest[0][h] - grown);
      state.largest[0][h] = grown;
      state.sum[0][h] *= shrink[0][h];
    }
    if constexpr (!kFirst) Rows::shrink_output(state, shrink);
  }

  // In all four lanes that hold a row.
  __device__ __forceinline__ static bool row_fits(bool fits) {
    int asking = fits ? 0 : 1;
    asking |= __shfl_xor_sync(0xffffffffu, asking, 1);
    asking |= __shfl_xor_sync(0xffffffffu, asking, 2);
    return asking == 0;
  }

  // Steps kBegin ... kEnd - 1; of 8 bits in the order of tokens that transpose_values() leaves, and
  // a row `fits` only if each step's sum does.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ static void make(const State& state, const Logits& logits,
                                              const float (&scale)[2], uint32_t (&p)[kSteps][1][4],
                                              float (&sum)[2], bool (&fits)[2]) {
    using Pair = PackedPair<typename Tile::Mma>;
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
      float step_sum[2];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        constexpr int kWeights = kProductsAre8Bit ? 4 : 2;  // of a register
        const int h = r % 2, tile = kProductsAre8Bit ? 4 * step + r / 2 * 2 : 2 * step + r / 2;
        float weights[kWeights];
#pragma unroll
        for (int i = 0; i < kWeights; ++i) {
          const float logit = logits[0][tile + i / 2][2 * h + i % 2];
          weights[i] = math::ptx_exp2(fmaf(logit, scale[h], -state.largest[0][h]));
        }
        if constexpr (kProductsAre8Bit) {
          const float four = (weights[0] + weights[1]) + (weights[2] + weights[3]);
          step_sum[h] = r < 2 ? four : step_sum[h] + four;  // 0 + x would be an instruction
          p[step][0][r] = Pair::pack(weights[0], weights[1]) |
                          static_cast<uint32_t>(Pair::pack(weights[2], weights[3])) << 16;
        } else {
          sum[h] += weights[0] + weights[1];
          p[step][0][r] = Pair::pack(weights[0], weights[1]);
        }
      }
      if constexpr (kProductsAre8Bit) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          fits[h] = fits[h] && step_sum[h] <= kMost;  // not if it is NaN
          sum[h] = step == 0 ? step_sum[h] : sum[h] + step_sum[h];
        }
      }
    }
  }
};

}  // namespace flashinfer
