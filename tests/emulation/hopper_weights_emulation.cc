// Weights of the kernel for Hopper, emulated on the CPU for one warp: a row's bits do not depend on
// the warp's other rows, which may be another request's, and are what its logits say.
//
//   hopper_weights_emulation <trials>
//
// Prints what is wrong with the first bad trial and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/attention/sm90/tile.cuh>
#include <flashinfer/attention/sm90/weights.cuh>

#include <cfloat>
#include <random>
#include <vector>

namespace flashinfer {
namespace {

constexpr int kTiles = 6;
constexpr bool is_own(int row) { return row % 3 == 0; }  // rows that a lane holds first and second

// With a cap logits are near 0 up to half of it.

template <typename T, bool kSoftCap, bool kFewForms = false>
struct Traits {
  using Tile = HopperTile<T, T, dtype::bfloat16, 128, 128, sizeof(T) == 1 ? 3 : 2>;
  using Variant = DefaultAttention<kSoftCap, false, false>;
  static constexpr int kKind = 0;
  static constexpr bool kUserVariant = kFewForms;
  static constexpr bool kPaged = true, kWindow = false;
  static constexpr MaskMode kMask = MaskMode::none;
};

// [tile][row][token]
using AllLogits = std::vector<std::vector<std::vector<float>>>;

// A lane's results for one of its rows after all tiles.
struct Result {
  float largest, sum, output;
  std::vector<uint8_t> weights;
  bool operator==(const Result& other) const {
    const auto bits = [](float x) { return emulation::bit_cast<uint32_t>(x); };
    return bits(largest) == bits(other.largest) && bits(sum) == bits(other.sum) &&
           bits(output) == bits(other.output) && weights == other.weights;
  }
};

// Results by row and lane of the row.
template <typename T, bool kSoftCap, bool kFewForms>
std::vector<std::vector<Result>> run(const AllLogits& logits, float cap_of_logits) {
  using Form = Traits<T, kSoftCap, kFewForms>;
  using Tile = typename Form::Tile;
  using Weights = HopperWeights<Form, AttentionParams<VariantParams>>;
  constexpr int kSteps = Tile::kTileKV / Tile::kStepTokens;
  std::vector<std::vector<Result>> results(16, std::vector<Result>(4));
  const auto lane = [&] {
    const int lane_idx = emulation::block.thread();
    WarpState<Tile> state = {};
    for (int h = 0; h < 2; ++h) state.largest[0][h] = -FLT_MAX;  // as Rows::begin does
    for (auto& tile : state.output[0]) tile[0] = tile[1] = tile[2] = tile[3] = 1.f;
    const float scale[2] = {1.f, 1.f};
    for (int tile = 0; tile < kTiles; ++tile) {
      float held[1][Tile::kTokenTiles][4];
      for (int j = 0; j < Tile::kTokenTiles; ++j) {
        for (int e = 0; e < 4; ++e) {
          held[0][j][e] = logits[tile][lane_idx / 4 + e / 2 * 8][j * 8 + lane_idx % 4 * 2 + e % 2];
        }
      }
      uint32_t p[kSteps][1][4];
      if constexpr (kSoftCap) {
        const math::SoftCap cap(cap_of_logits, 1.f, math::log2e);
        if (tile == 0) {
          Weights::template weigh_capped<true, Tile::kTokenTiles>(state, held, p, cap, [] {});
        } else {
          Weights::template weigh_capped<false, Tile::kTokenTiles>(state, held, p, cap, [] {});
        }
      } else if (tile == 0) {
        Weights::template weigh<true, Tile::kTokenTiles>(state, held, scale, p, [] {});
      } else {
        Weights::template weigh<false, Tile::kTokenTiles>(state, held, scale, p, [] {});
      }
      for (int h = 0; h < 2; ++h) {
        Result& result = results[lane_idx / 4 + h * 8][lane_idx % 4];
        result.largest = state.largest[0][h];
        result.sum = state.sum[0][h];
        result.output = state.output[0][0][2 * h];
        for (int step = 0; step < kSteps; ++step) {
          for (int r = h; r < 4; r += 2) {
            for (int byte = 0; byte < 4; ++byte) {
              result.weights.push_back(p[step][0][r] >> (8 * byte) & 0xff);
            }
          }
        }
      }
    }
  };
  emulation::block.run(32, 1, lane, [](int thread) { threadIdx.x = thread; });
  return results;
}

// Normal logits of one of several widths, at times growing from tile to tile.
std::vector<float> draw_row(std::mt19937& random, int tokens, float width, float offset) {
  std::normal_distribution<float> normal(offset, width);
  std::vector<float> row(tokens);
  for (float& logit : row) logit = normal(random);
  return row;
}

// The exponent of a logit, in base 2.
template <bool kSoftCap>
double exponent_of(float logit, double cap) {
  if (logit == -math::inf) return logit;
  return kSoftCap ? std::tanh(logit / cap) * cap / std::log(2.) : logit;
}

template <typename T, bool kSoftCap, bool kFewForms = false>
bool check(const char* type, int trials) {
  constexpr int kTokens = Traits<T, kSoftCap>::Tile::kTileKV;
  std::mt19937 random(7);
  const auto one_of = [&](std::vector<float> values) { return values[random() % values.size()]; };
  int grown = 0;
  for (int trial = 0; trial < trials; ++trial) {
    AllLogits alone(kTiles, std::vector<std::vector<float>>(16, std::vector<float>(kTokens, 0.f)));
    AllLogits beside = alone;
    const bool hides_own = kSoftCap && random() % 3 == 0;
    const float cap = one_of({1.f, 30.f, 50.f});
    for (int row = 0; row < 16; ++row) {
      const float width = one_of({0.1f, 1.f, 4.f, 12.f});
      const float growth = one_of({0.f, 0.f, 1.f, 3.f, 12.f, -6.f});
      const float start = growth < 0.f ? 16.f : 0.f;
      for (int tile = 0; tile < kTiles; ++tile) {
        beside[tile][row] = draw_row(random, kTokens, width, start + growth * tile);
        if (!is_own(row) && random() % 20 == 0) beside[tile][row][0] = math::nan;
        if (kSoftCap && (hides_own || !is_own(row)) && random() % 2) {
          beside[tile][row][random() % kTokens] = -math::inf;
        }
        if (is_own(row)) alone[tile][row] = beside[tile][row];
      }
    }
    const auto first = run<T, kSoftCap, kFewForms>(alone, cap);
    const auto second = run<T, kSoftCap, kFewForms>(beside, cap);
    for (int row = 0; row < 16; ++row) {
      if (!is_own(row)) continue;
      double sum = 0., expected = 0.;
      for (int lane = 0; lane < 4; ++lane) {
        const Result& result = first[row][lane];
        if (!(result == second[row][lane])) {
          std::printf("%s trial %d row %d lane %d: not the same beside other rows\n", type, trial,
                      row, lane);
          return false;
        }
        sum += result.sum;
        grown += result.output != 1.f;
      }
      for (const auto& tile : alone) {
        for (const float logit : tile[row]) {
          expected += std::exp2(exponent_of<kSoftCap>(logit, cap) - first[row][0].largest);
        }
      }
      // An error of the cap is one of exponents.
      if (!(std::fabs(sum / expected - 1.) < (kSoftCap ? 1.2e-5 * cap + 1e-4 : 1e-4))) {
        std::printf("%s trial %d row %d: sum %g, expected %g\n", type, trial, row, sum, expected);
        return false;
      }
    }
  }
  if (grown == 0) std::printf("%s: no row ever grew\n", type);
  return grown > 0;
}

}  // namespace
}  // namespace flashinfer

int main(int, char** arguments) {
  using namespace flashinfer;
  const int trials = std::atoi(arguments[1]);
  return check<dtype::bfloat16, false>("bfloat16", trials) &&
                 check<dtype::bfloat16, true>("bfloat16, capped", trials) &&
                 check<dtype::bfloat16, false, true>("bfloat16, few forms", trials) &&
                 check<dtype::float8_e4m3fn, false>("float8_e4m3fn", trials)
             ? 0
             : 1;
}
