// Weights of 8 bits, from a warp's logits, in the attention kernel for Hopper.
//
// A row's largest logit seldom grows, and to look for it takes a sixth of a tile's instructions. So
// exponentials are taken against the largest so far, and a lane's sums of them tell afterwards
// whether one may be more than 8 bits hold: then, and in an item's first tile, the largest is
// looked for and the weights are made again. Logits stay as they are until then.
#pragma once

#include <flashinfer/attention/rows.cuh>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

template <typename Traits, typename Params>
class Float8Weights {
  using Tile = typename Traits::Tile;
  using Rows = TileRows<Traits, Params>;
  using State = WarpState<Tile>;
  using Logits = float[1][Tile::kTokenTiles][4];
  static constexpr int kSteps = Tile::kTileKV / Tile::kStepTokens;
  static constexpr float kMost = 448.f;  // the largest number of e4m3
  // The largest weight of a row, when it has been looked for, is 2^3: one that 8 bits hold exactly,
  // small enough that a lane's sum of equal ones has room to grow.
  static constexpr float kHeadroom = 3.f;
  static_assert(Tile::kTokenTiles * 2 * 8 < kMost);

 public:
  // Makes `p` of a tile's logits and adds the weights to the rows' sums. Registers of `p` are
  // written behind finish_values(), which waits for the product that reads them.
  template <bool kFirst, typename FinishValues>
  __device__ __forceinline__ static void weigh(State& state, const Logits& logits,
                                               const float (&scale)[2], uint32_t (&p)[kSteps][1][4],
                                               const FinishValues& finish_values) {
    float sum[2] = {0.f, 0.f};
    if constexpr (kFirst) {
      grow<true>(state, logits, scale);
      finish_values();
      make<0, kSteps>(state, logits, scale, p, sum);
    } else {
      uint32_t ahead[kSteps][1][4];  // of which the first are used
      make<0, kAhead>(state, logits, scale, ahead, sum);
      // Asked now, too, since the compiler keeps the wait behind a vote: else it stands in front.
      const bool any_early = __any_sync(0xffffffffu, !fits(sum));
      finish_values();
      make<kAhead, kSteps>(state, logits, scale, p, sum);
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        // As instructions of their own: else the compiler would write `p` at once.
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          asm volatile("mov.b32 %0, %1;" : "=r"(p[step][0][r]) : "r"(ahead[step][0][r]));
        }
      }
      if (__builtin_expect(__any_sync(0xffffffffu, any_early || !fits(sum)), false)) {
        grow<false>(state, logits, scale);
        sum[0] = sum[1] = 0.f;
        make<0, kSteps>(state, logits, scale, p, sum);
      }
    }
    state.sum[0][0] += sum[0];
    state.sum[0][1] += sum[1];
  }

 private:
  static constexpr int kAhead = 1;  // steps whose weights are made while p v is under way

  __device__ __forceinline__ static bool fits(const float (&sum)[2]) {
    return sum[0] <= kMost && sum[1] <= kMost;  // not if one is NaN
  }

  // The largest exponents with these logits, and what was summed so far to match.
  template <bool kFirst>
  __device__ __forceinline__ static void grow(State& state, const Logits& logits,
                                              const float (&scale)[2]) {
    float shrink[1][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = Rows::template lane_largest<0, Tile::kTokenTiles>(logits[0], h);
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float grown = fmaxf(state.largest[0][h], largest * scale[h] - kHeadroom);
      shrink[0][h] = math::ptx_exp2(state.largest[0][h] - grown);
      state.largest[0][h] = grown;
      state.sum[0][h] *= shrink[0][h];
    }
    if constexpr (!kFirst) Rows::shrink_output(state, shrink);
  }

  // Steps kBegin ... kEnd - 1, in the order of tokens that transpose_values() leaves.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ static void make(const State& state, const Logits& logits,
                                              const float (&scale)[2], uint32_t (&p)[kSteps][1][4],
                                              float (&sum)[2]) {
    using Pair = PackedPair<typename Tile::Mma>;
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int h = r % 2;
        float weights[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float logit = logits[0][4 * step + r / 2 * 2 + i / 2][2 * h + i % 2];
          weights[i] = math::ptx_exp2(fmaf(logit, scale[h], -state.largest[0][h]));
        }
        sum[h] += (weights[0] + weights[1]) + (weights[2] + weights[3]);
        p[step][0][r] = Pair::pack(weights[0], weights[1]) |
                        static_cast<uint32_t>(Pair::pack(weights[2], weights[3])) << 16;
      }
    }
  }
};

}  // namespace flashinfer
