// Turns a warp's logits into weights in the Hopper attention kernel.
//
// A row's maximum seldom grows, and finding it costs a sixth of a tile's instructions. Exponentials
// are therefore taken relative to the maximum so far, and a lane's sum shows afterwards whether a
// weight may be too large or may dominate its row. Only then, and in an item's first tile, the
// maximum is computed and the weights are made again; the logits stay unchanged until then. Rows
// that pass the test keep their weights bit for bit, since a tile's last rows may belong to another
// request.
//
// While the special function unit makes a tile's exponentials, the multipliers have time. There a
// soft cap's polynomial is evaluated, as if all logits were near 0 against the cap, and the vote
// about the sums shows whether they were. If not, the logits are capped exactly, which changes no
// bit of those that were, and a row that has others takes its maximum anew.
//
// Measurements, also of what lost: docs/tuning/attention_sm90.md and attention_sm90_fp8.md.
#pragma once

#include <flashinfer/attention/rotation.cuh>
#include <flashinfer/attention/rows.cuh>
#include <flashinfer/attention/sm90/tile.cuh>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

template <typename Traits, typename Params>
class HopperWeights {
  using Tile = typename Traits::Tile;
  using Rows = TileRows<Traits, Params>;
  using State = WarpState<Tile>;
  using SoftCap = math::SoftCap;
  using Logits = float[1][Tile::kTokenTiles][4];
  static constexpr bool kProductsAre8Bit = Tile::kProductsAre8Bit;
  static constexpr int kSteps = Tile::kTileKV / Tile::kStepTokens;
  // Upper bound of a lane's sum: over a tile with 16-bit weights, over a step with 8-bit weights,
  // where it is also the largest finite number.
  static constexpr float kMost = kProductsAre8Bit ? 448.f : 512.f;
  // After its maximum has been computed, a row's largest weight is 2^kHeadroom. 8-bit weights span
  // 2^-9 to 448. A smaller exponent leaves more room to grow but costs the last bits of small
  // weights. With a larger one the sum of eight equal weights of a lane would fail the test in each
  // tile.
  static constexpr float kHeadroom = kProductsAre8Bit ? 5.f : 0.f;
  // The weight that dominates its row should need no rounding. With 16-bit weights the maximum is
  // therefore also computed when a lane's sum exceeds kPeak times its earlier sum plus kFewLargest.
  // Ordinary queries and keys hardly ever trigger this. With 8-bit weights there are no registers
  // for this test.
  static constexpr float kPeak = 4.f, kFewLargest = 4.f;
  // A weight below 2^-kLeastNear of its row's largest may have a relative error of percents.
  static constexpr float kLeastNear = 16.f;
  static_assert(kProductsAre8Bit ? 8 * 32 < kMost : Tile::kTokenTiles * 2 < kMost);

 public:
  // Makes the weights `p` of the tile's first `kTiles` token tiles and adds them to the rows' sums.
  // The registers of `p` are written after finish_values(), which waits for the product that reads
  // them.
  template <bool kFirst, int kTiles, typename FinishValues>
  __device__ __forceinline__ static void weigh(State& state, const Logits& logits,
                                               const float (&scale)[2], uint32_t (&p)[kSteps][1][4],
                                               const FinishValues& finish_values) {
    constexpr int kTileSteps = kTiles * 8 / Tile::kStepTokens;
    const auto exponent_of = [&](float largest, int h) { return largest * scale[h]; };
    float sum[2] = {0.f, 0.f};
    bool fits[2] = {true, true};  // for the lane's two rows
    if constexpr (kFirst) {
      grow<true, kTiles>(state, logits, exponent_of, fits);
      finish_values();
      make<0, kTileSteps>(state, logits, scale, p, sum, fits);
    } else if constexpr (hopper_has_few_forms<Traits>() && kAhead == 0) {
      finish_values();
      bool is_again = false;
#pragma unroll 1
      while (true) {
        make<0, kTileSteps>(state, logits, scale, p, sum, fits);
        if (is_again) break;
        tile_fits(state, sum, fits);
        if (__builtin_expect(!__any_sync(0xffffffffu, !(fits[0] && fits[1])), true)) break;
        grow<false, kTiles>(state, logits, exponent_of, fits);
        sum[0] = sum[1] = 0.f;
        is_again = true;
      }
    } else {
      uint32_t ahead[kSteps][1][4];  // only the first kAhead are used
      make<0, kAhead>(state, logits, scale, ahead, sum, fits);
      // This extra vote fixes the order: the compiler keeps the wait after a vote, and otherwise
      // moves it before the weights.
      bool all_fit = true;
      if constexpr (kAhead > 0) all_fit = __all_sync(0xffffffffu, fits[0] && fits[1]);
      finish_values();
      make<kAhead, kTileSteps>(state, logits, scale, p, sum, fits);
      if constexpr (!kProductsAre8Bit) tile_fits(state, sum, fits);
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        // Explicit moves: otherwise the compiler writes `p` at once, before the wait.
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          asm volatile("mov.b32 %0, %1;" : "=r"(p[step][0][r]) : "r"(ahead[step][0][r]));
        }
      }
      all_fit = all_fit && fits[0] && fits[1];
      if (__builtin_expect(__any_sync(0xffffffffu, !all_fit), false)) {
        grow<false, kTiles>(state, logits, exponent_of, fits);
        sum[0] = sum[1] = 0.f;
        make<0, kTileSteps>(state, logits, scale, p, sum, fits);
      }
    }
    state.sum[0][0] += sum[0];
    state.sum[0][1] += sum[1];
  }

  // The same with a soft cap, which is not yet applied to the logits.
  template <bool kFirst, int kTiles, typename FinishValues>
  __device__ __forceinline__ static void weigh_capped(State& state, Logits& logits,
                                                      uint32_t (&p)[kSteps][1][4],
                                                      const SoftCap& soft_cap,
                                                      const FinishValues& finish_values) {
    constexpr int kTileSteps = kTiles * 8 / Tile::kStepTokens;
    float sum[2] = {0.f, 0.f};
    bool fits[2] = {true, true};
    const auto grow_by_cap = [&] {
      grow<kFirst, kTiles>(
          state, logits, [&](float largest, int) { return capped(soft_cap, largest); }, fits);
    };
    if constexpr (kFirst) grow_by_cap();
    finish_values();
    // Mostly a row does not fit because it grows: where the mask hides most of an item's first
    // tile, the second one has larger logits. These weights are made again by a branch back to the
    // same code, since a second copy leaves ptxas without registers for the products (C7511). With
    // a custom mask the branch has the same effect, so there it is left out.
    constexpr bool kMakesAgain = !kFirst && Traits::kMask != MaskMode::custom;
    bool has_grown = false;
#pragma unroll 1
    while (true) {
      make_near<kTileSteps>(state, logits, soft_cap, p, sum);
      if (has_grown) break;
      if constexpr (!kFirst) tile_fits(state, sum, fits);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        fits[h] = sum[h] <= most_near(soft_cap, state.largest[0][h]) && fits[h];
      }
      if (__builtin_expect(!__any_sync(0xffffffffu, !(fits[0] && fits[1])), true)) break;
      bool is_near[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) is_near[h] = row_fits(fits[h]);
      if constexpr (!kFirst) grow_by_cap();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        is_near[h] = is_near[h] || state.largest[0][h] <= soft_cap.most_result &&
                                       state.largest[0][h] >= kLeastNear - soft_cap.most_result;
      }
      if (!kMakesAgain || __any_sync(0xffffffffu, !(is_near[0] && is_near[1]))) {
        make_exact<kTileSteps>(state, logits, soft_cap, is_near, p, sum);
        break;
      }
      has_grown = true;
      sum[0] = sum[1] = 0.f;
    }
    state.sum[0][0] += sum[0];
    state.sum[0][1] += sum[1];
  }

 private:
  // Number of steps whose weights are made while p v is in flight. With 16-bit weights the compiler
  // has only the registers of `p` for them, and so would wait first.
  static constexpr int kAhead = kProductsAre8Bit ? 1 : 0;

  // Sum of a lane's weights up to which those of make_near() serve a row whose largest exponent is
  // `largest`; negative if they never do.
  __device__ __forceinline__ static float most_near(const SoftCap& soft_cap, float largest) {
    const float most = fminf(math::ptx_exp2(soft_cap.most_result - largest), kMost);
    return largest >= kLeastNear - soft_cap.most_result ? most : -1.f;
  }

  // Makes weights as if all logits were near 0 against the soft cap.
  template <int kTileSteps>
  __device__ __forceinline__ static void make_near(const State& state, const Logits& logits,
                                                   const SoftCap& soft_cap,
                                                   uint32_t (&p)[kSteps][1][4], float (&sum)[2]) {
    // A shuffle stays after the wait for p v, and keeps the squares there. Made before, a tile's
    // squares would not fit into the registers.
    const float zero = __shfl_sync(0xffffffffu, 0.f, 0);
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int h = r % 2;
        const float (&tile)[4] = logits[0][2 * step + r / 2];
        const float a = math::ptx_exp2(soft_cap.near(tile[2 * h], state.largest[0][h], zero));
        const float b = math::ptx_exp2(soft_cap.near(tile[2 * h + 1], state.largest[0][h], zero));
        sum[h] += a + b;
        p[step][0][r] = PackedPair<typename Tile::Weight>::pack(a, b);
      }
    }
  }

  // The exponent of any logit; a hidden one of -inf stays so.
  __device__ __forceinline__ static float capped(const SoftCap& soft_cap, float logit,
                                                 float less = 0.f) {
    const float exponent = soft_cap.exact(logit, less);
    return logit == -math::inf ? logit : exponent;
  }

  // Makes weights of any capped logits, with the bits of make_near() for rows that are near. Each
  // turn of the loop has its logits and weights in the same registers, which rotate: unrolled, this
  // rare path leaves ptxas without registers for the products (C7511).
  template <int kTileSteps>
  __device__ __forceinline__ static void make_exact(const State& state, Logits& logits,
                                                    const SoftCap& soft_cap,
                                                    const bool (&is_near)[2],
                                                    uint32_t (&p)[kSteps][1][4], float (&sum)[2]) {
    sum[0] = sum[1] = 0.f;
#pragma unroll 1
    for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int h = r % 2;
        float weights[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float logit = logits[0][r / 2][2 * h + i], less = state.largest[0][h];
          const float near = soft_cap.near(logit, less), any = capped(soft_cap, logit, less);
          weights[i] = math::ptx_exp2(is_near[h] ? near : any);
        }
        sum[h] += weights[0] + weights[1];
        p[0][0][r] = PackedPair<typename Tile::Weight>::pack(weights[0], weights[1]);
      }
      rotate_fragments<2, 2 * kTileSteps>([&](int j) -> float (&)[4] { return logits[0][j]; });
      rotate_fragments<1, kTileSteps>([&](int j) -> uint32_t (&)[4] { return p[j][0]; });
    }
  }

  // Tests the sums of 16-bit weights. A NaN sum does not fit.
  __device__ __forceinline__ static void tile_fits(const State& state, const float (&sum)[2],
                                                   bool (&fits)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      fits[h] = sum[h] <= kMost && fmaf(-kPeak, state.sum[0][h], sum[h]) <= kFewLargest;
    }
  }

  // Updates the maximum of each row that does not fit, and rescales its sum and its output.
  template <bool kFirst, int kTiles, typename ExponentOf>
  __device__ __forceinline__ static void grow(State& state, const Logits& logits,
                                              const ExponentOf& exponent_of,
                                              const bool (&fits)[2]) {
    float shrink[1][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = Rows::template row_largest<kTiles>(logits[0], h);
      float grown = fmaxf(state.largest[0][h], exponent_of(largest, h) - kHeadroom);
      if (!kFirst && row_fits(fits[h])) grown = state.largest[0][h];
      shrink[0][h] = math::ptx_exp2(state.largest[0][h] - grown);
      state.largest[0][h] = grown;
      state.sum[0][h] *= shrink[0][h];
    }
    if constexpr (!kFirst) Rows::shrink_output(state, shrink);
  }

  // Combines `fits` over the four lanes that hold a row.
  __device__ __forceinline__ static bool row_fits(bool fits) {
    int asking = fits ? 0 : 1;
    asking |= __shfl_xor_sync(0xffffffffu, asking, 1);
    asking |= __shfl_xor_sync(0xffffffffu, asking, 2);
    return asking == 0;
  }

  // Makes the weights of steps kBegin ... kEnd - 1. 8-bit weights come in the order of tokens that
  // transpose_values() leaves, and a row `fits` only if the sum of each step does.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ static void make(const State& state, const Logits& logits,
                                              const float (&scale)[2], uint32_t (&p)[kSteps][1][4],
                                              float (&sum)[2], bool (&fits)[2]) {
    using Pair = PackedPair<typename Tile::Weight>;
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
      float step_sum[2];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        constexpr int kWeights = kProductsAre8Bit ? 4 : 2;  // per register
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
          fits[h] = fits[h] && step_sum[h] <= kMost;  // false for NaN
          sum[h] = step == 0 ? step_sum[h] : sum[h] + step_sum[h];
        }
      }
    }
  }
};

}  // namespace flashinfer
