// A random product in groups with packed weights, and what it is in double precision.
#pragma once

#include <flashinfer/gemm/activation.cuh>
#include <flashinfer/gemm/weight_codes.cuh>
#include <flashinfer/gemm/weight_gemm_params.h>

#include <vector>

#include "random.h"

namespace flashinfer {
namespace {

using BF16 = dtype::bfloat16;

template <WeightFormat format, typename AType, typename ScaleType, int group, int tokens, int warps,
          GemmActivation activation, int columns = 0>
struct Config {
  using A = AType;
  using D = AType;
  using Scale = ScaleType;
  static constexpr WeightFormat kFormat = format;
  static constexpr int kGroup = group, kTokens = tokens, kWarps = warps, kSplits = 1;
  static constexpr int kColumns = columns;
  static constexpr GemmActivation kActivation = activation;
};

double code_value(WeightFormat format, uint8_t byte, int half) {
  if (format == WeightFormat::int8) return static_cast<int8_t>(byte);
  const int code = byte >> (4 * half) & 15;
  if (format == WeightFormat::int4) return code < 8 ? code : code - 16;
  constexpr double kMagnitudes[8] = {0., 0.5, 1., 1.5, 2., 3., 4., 6.};
  return (code < 8 ? 1. : -1.) * kMagnitudes[code % 8];
}

double activate(GemmActivation activation, double value, double gate, const float (&constants)[3]) {
  if (activation == GemmActivation::identity) return value;
  if (activation == GemmActivation::relu2) return value > 0. ? value * value : 0.;
  if (activation == GemmActivation::geglu_gate_last) {
    return 0.5 * gate * (1. + std::erf(gate / std::sqrt(2.))) * value;
  }
  const double limit = constants[2];
  gate = std::min(gate, limit);
  value = std::min(std::max(value, -limit), limit);
  return gate / (1. + std::exp(-constants[0] * gate)) * (value + constants[1]);
}

// Groups, some without rows; rows after the last group's belong to none.
std::vector<int32_t> random_offsets(Random& random, int groups) {
  std::vector<int32_t> offsets(groups + 1);
  for (int g = 0; g < groups; ++g) {
    const int rows = random.one_in(2)   ? 0
                     : random.one_in(6) ? random.integer(9, 40)
                                        : random.integer(1, 9);
    offsets[g + 1] = offsets[g] + rows;
  }
  return offsets;
}

template <typename T>
struct Product {
  static constexpr WeightFormat kFormat = T::kFormat;
  static constexpr bool kGated = is_gated(T::kActivation);
  static constexpr int kBits = weight_bits(kFormat);
  int groups, rows, inputs, n, k, scales_of_row;
  bool misses_rows;
  std::vector<int32_t> offsets, row_index;
  std::vector<typename T::A> a, bias, out;
  std::vector<uint8_t> weights;
  std::vector<typename T::Scale> scales;
  std::vector<float> alphas, gate[3];
  WeightGemmParams params = {};

  // k is a multiple of `unit`, and no row of the index is missing; 0: whatever a group allows.
  // `tokens`: a single group has these rows, each its own; 0: groups have random ones.
  explicit Product(Random& random, int unit = 0, int tokens = 0) {
    groups = tokens == 0 ? random.integer(1, 70) : 1;
    offsets = tokens == 0 ? random_offsets(random, groups) : std::vector<int32_t>{0, tokens};
    rows = offsets[groups] + (tokens == 0 ? random.integer(0, 3) : 0);
    if (rows == 0) rows = 1;
    n = 8 * random.integer(1, 12);
    k = (kBits == 8 ? 16 : 32) * random.integer(1, 24);
    if (T::kGroup > 32) k = T::kGroup * random.integer(1, 5);
    if (unit != 0) k = unit * random.integer(1, 6);
    misses_rows = unit == 0;
    inputs = tokens == 0 ? random.integer(1, 20) : tokens;
    scales_of_row = T::kGroup == 0 ? 1 : ceil_div(k, T::kGroup ? T::kGroup : 1);
    fill(random);
    for (int i = 0; i < tokens; ++i) row_index[i] = i;
    set_params(random);
  }

  void fill(Random& random) {
    row_index.resize(rows);
    for (int32_t& row : row_index) {
      row = misses_rows && random.one_in(20) ? -1 : random.integer(0, inputs - 1);
    }
    a.resize(inputs * k);
    for (auto& value : a) value = from_float<typename T::A>(random.normal(1.f));
    weights.resize(static_cast<size_t>(groups) * n * k * kBits / 8);
    for (uint8_t& byte : weights) byte = static_cast<uint8_t>(random.integer(0, 255));
    scales.resize(groups * n * scales_of_row);
    for (auto& scale : scales) {
      if constexpr (sizeof(scale) == 1 && std::is_integral_v<typename T::Scale>) {
        // Now and then one that bfloat16 cannot hold times its codes' place.
        const bool is_large = T::kActivation == GemmActivation::identity && random.one_in(500);
        scale = static_cast<uint8_t>(random.integer(119, 126) + (is_large ? 40 : 0));
      } else {
        scale = from_float<typename T::Scale>(0.05f + std::fabs(random.normal(0.2f)));
      }
    }
    bias.resize(groups * n);
    for (auto& value : bias) value = from_float<typename T::A>(random.normal(1.f));
    alphas.resize(groups);
    for (float& alpha : alphas) alpha = 0.1f + std::fabs(random.normal(0.1f));
    for (int i = 0; i < 3; ++i) {
      gate[i].resize(groups);
      for (float& x : gate[i]) x = std::fabs(random.normal(1.f)) + (i == 2 ? 2.f : 0.5f);
    }
    out.assign(rows * (kGated ? n / 2 : n), typename T::A{0x7fff});
  }

  void set_params(Random& random) {
    params.a = a.data();
    params.d = out.data();
    params.weights = weights.data();
    params.scales = scales.data();
    params.bias = random.one_in(2) ? bias.data() : nullptr;
    params.a_stride = k;
    params.d_stride = kGated ? n / 2 : n;
    params.weight_stride = k * kBits / 8;
    params.weight_group_stride = n * params.weight_stride;
    params.scale_stride = scales_of_row;
    params.scale_group_stride = n * scales_of_row;
    params.m = rows;
    params.n = n;
    params.k = k;
    params.alpha = 1.f;
    params.alphas = random.one_in(2) ? alphas.data() : nullptr;
    params.alpha_stride = random.one_in(2) ? 1 : 0;
    params.offsets = offsets.data();
    params.num_groups = groups;
    params.token_tiles = std::min(rows, static_cast<int>(ceil_div(rows, T::kTokens)) + groups);
    params.row_index = row_index.data();
    params.num_input_rows = inputs;
    params.gate_alpha = 1.f;
    params.gate_limit = INFINITY;
    if (random.one_in(2)) {
      params.gate_alphas = gate[0].data();
      params.gate_betas = gate[1].data();
      params.gate_limits = gate[2].data();
    }
  }

  // The sum that row `row` of the result has for row `column` of the group's weights.
  double sum(int row, int group, int column, double* magnitude) const {
    double total = 0.;
    const size_t weight_row = static_cast<size_t>(group) * n + column;
    for (int i = 0; row_index[row] >= 0 && i < k; ++i) {
      const uint8_t byte = weights[(weight_row * k + i) * kBits / 8];
      const int scale = T::kGroup == 0 ? 0 : i / (T::kGroup ? T::kGroup : 1);
      const double term = code_value(kFormat, byte, i % 2) *
                          scale_to_float(scales[weight_row * scales_of_row + scale]) *
                          to_float(a[row_index[row] * k + i]);
      total += term;
      *magnitude += std::fabs(term);
    }
    const float alpha = params.alphas ? alphas[group * params.alpha_stride] : 1.f;
    *magnitude *= alpha;
    return total * alpha + (params.bias ? to_float(bias[weight_row]) : 0.f);
  }

  bool check() const {
    const int columns = kGated ? n / 2 : n;
    std::vector<int> group_of(rows, -1);
    for (int g = 0; g < groups; ++g) {
      for (int row = offsets[g]; row < offsets[g + 1]; ++row) group_of[row] = g;
    }
    for (int i = 0; i < rows * columns; ++i) {
      const int row = i / columns, column = i % columns, g = group_of[row];
      const double got = to_float(out[i]);
      if (g < 0) {
        if (out[i].bits == 0x7fff) continue;
        return std::printf("row %d has no group: got %g\n", row, got), false;
      }
      float constants[3] = {1.f, 0.f, INFINITY};
      for (int j = 0; params.gate_alphas && j < 3; ++j) constants[j] = gate[j][g];
      double magnitude = 1.;
      const double value = sum(row, g, column, &magnitude);
      const double second = kGated ? sum(row, g, column + columns, &magnitude) : 0.;
      const double expected = activate(T::kActivation, value, second, constants);
      const double slope = T::kActivation == GemmActivation::identity ? 1. : magnitude + 4.;
      if (!(std::fabs(got - expected) <= std::fabs(expected) / 100 + magnitude * slope * 1e-5)) {
        std::printf("row %d column %d of group %d: got %g, expected %g\n", row, column, g, got,
                    expected);
        return false;
      }
    }
    return true;
  }
};

}  // namespace
}  // namespace flashinfer
