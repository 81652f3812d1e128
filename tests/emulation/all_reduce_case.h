// Random calls of the all-reduce as every rank knows them, and what must come of them, for
// comm_emulation.cc.
#pragma once

#include <flashinfer/comm/all_reduce.cuh>

#include <cstdio>
#include <random>
#include <vector>

namespace flashinfer {
namespace {

using BF16 = dtype::bfloat16;
constexpr int kVec = 8;
constexpr float kEps = 1e-5f, kRoutedScale = 1.5f;

struct Random {
  std::mt19937 engine;
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  std::vector<BF16> numbers(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<BF16> values(count);
    for (BF16& value : values) value = from_float<BF16>(normal(engine));
    return values;
  }
};

bool complain(uint32_t rank, const char* what, int64_t index, double got, double expected) {
  std::printf("rank %u: %s %lld: got %g, expected %g\n", rank, what, static_cast<long long>(index),
              got, expected);
  return false;
}

float e4m3_value(uint8_t bits) { return to_float(dtype::float8_e4m3fn{bits}); }

// Whether `bits` is a nearest e4m3 number to x, saturated.
bool is_nearest_e4m3(uint8_t bits, double x) {
  const double bounded = std::fmin(std::fmax(x, -448.), 448.);
  double best = INFINITY;
  for (int other = 0; other < 256; ++other) {
    if ((other & 0x7f) == 0x7f) continue;
    best = std::fmin(best, std::fabs(e4m3_value(other) - bounded));
  }
  return std::fabs(e4m3_value(bits) - bounded) <= best * (1 + 1e-4) + 1e-9;
}

bool is_nearest_e2m1(int code, double x) {
  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const double bounded = std::fmin(std::fabs(x), 6.), value = kValues[code & 7];
  double best = INFINITY;
  for (const double other : kValues) best = std::fmin(best, std::fabs(other - bounded));
  if (value != 0 && (code >= 8) != (x < 0)) return false;
  return std::fabs(value - bounded) <= best + 1e-5;
}

// One call as every rank knows it.
struct Call {
  int rows, hidden, terms;
  bool one_shot, has_shared, has_weights;
  std::vector<std::vector<BF16>> inputs, shared, weights;  // of each rank
  std::vector<std::vector<float>> scales;
  std::vector<std::vector<int32_t>> permuted;
  std::vector<BF16> residual, gamma;
};

template <typename Input>
Call draw(Random& random, uint32_t ranks) {
  Call call = {};
  call.rows = random.integer(1, 9);
  call.hidden = 16 * random.integer(1, random.integer(1, 4) == 1 ? 260 : 20);
  call.terms = random.integer(1, 4);
  call.one_shot = random.integer(0, 1);
  call.has_shared = random.integer(0, 1) || std::is_same_v<Input, row_input::moe_reduction>;
  call.has_weights = random.integer(0, 1);
  const int size = call.rows * call.hidden, terms = call.rows * call.terms;
  call.residual = random.numbers(size);
  call.gamma = random.numbers(call.hidden);
  const int blocks = std::is_same_v<Input, row_input::tensor> ? 1 : call.terms;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    call.inputs.push_back(random.numbers(size * blocks));
    call.shared.push_back(random.numbers(size));
    call.weights.push_back(random.numbers(terms));
    call.scales.emplace_back();
    for (const BF16 x : random.numbers(terms)) call.scales.back().push_back(to_float(x));
    call.permuted.emplace_back();
    for (int i = 0; i < terms; ++i) call.permuted.back().push_back(random.integer(-1, terms));
    call.permuted.back()[0] = random.integer(0, 1) ? INT32_MAX : INT32_MIN;  // of no row
  }
  return call;
}

// What rank r adds to element `column` of a row, before it is rounded.
template <typename Input>
double contribution(const Call& call, uint32_t r, int row, int column) {
  const auto at = [&](const std::vector<BF16>& x, int64_t i) {
    return double{to_float(x[i * call.hidden + column])};
  };
  if constexpr (std::is_same_v<Input, row_input::tensor>) return at(call.inputs[r], row);
  const bool is_finalized = std::is_same_v<Input, row_input::moe_finalize>;
  double sum = 0.;
  for (int i = 0; i < call.terms; ++i) {
    if constexpr (std::is_same_v<Input, row_input::moe_reduction>) {
      const int expert_row = i * call.rows + row;
      sum += double{call.scales[r][expert_row]} * at(call.inputs[r], expert_row);
    } else {
      const int term = row * call.terms + i, permuted = call.permuted[r][term];
      const double weight = call.has_weights ? to_float(call.weights[r][term]) : 1.;
      if (permuted >= 0 && permuted < call.rows * call.terms)
        sum += weight * at(call.inputs[r], permuted);
    }
  }
  if (is_finalized) sum *= kRoutedScale;
  return sum + (call.has_shared ? at(call.shared[r], row) : 0.);
}

struct Results {
  std::vector<BF16> sum, residual, norm;
  std::vector<uint8_t> codes, scales;
  std::vector<float> row_scales;
};

template <typename Input, typename Output>
AllReduceParams params_of(const Call& call, const comm::CommWorkspace& workspace, float global,
                          Results& results) {
  const uint32_t rank = workspace.rank;
  const int size = call.rows * call.hidden;
  results.sum = results.residual = results.norm = std::vector<BF16>(size, BF16{0x7fff});
  results.codes.resize(size);
  results.scales.resize((call.rows + 127) / 128 * 128 * ((call.hidden / 16 + 3) / 4 * 4));
  results.row_scales.resize(call.rows);
  AllReduceParams params = {};
  params.workspace = workspace;
  params.input = call.inputs[rank].data();
  params.residual_in = call.residual.data();
  params.weight = call.gamma.data();
  params.sum_out = results.sum.data();
  params.residual_out = results.residual.data();
  params.norm_out = results.norm.data();
  params.quant_out = results.codes.data();
  params.scale_out = results.scales.data();
  if constexpr (std::is_same_v<Output, row_output::row_e4m3>) {
    params.scale_out = results.row_scales.data();
  }
  params.scale_value = global;
  params.eps = kEps;
  params.weight_bias = 0.5f;
  params.inv_hidden = 1.f / call.hidden;
  params.num_rows = call.rows;
  params.row_vecs = call.hidden / kVec;
  params.total_vecs = params.num_rows * params.row_vecs;
  params.expert_scales = call.scales[rank].data();
  params.expert_weights = call.has_weights ? call.weights[rank].data() : nullptr;
  params.permuted_rows = call.permuted[rank].data();
  params.shared_input = call.has_shared ? call.shared[rank].data() : nullptr;
  params.num_terms = call.terms;
  params.num_input_rows = call.rows * call.terms;
  params.routed_scale = kRoutedScale;
  params.completes_at_end = true;
  return params;
}

// As docs of cuBLAS draw the tiles: those of 4 scales follow each other along a row.
template <typename Output>
int64_t scale_offset(int row, int group, int groups) {
  const int tiles = (groups + 3) / 4, tile = group / 4, column = group % 4;
  if constexpr (std::is_same_v<Output, row_output::nvfp4_linear>) return row * groups + group;
  if constexpr (std::is_same_v<Output, row_output::nvfp4_8x4>)
    return ((row / 8) * tiles + tile) * 32 + row % 8 * 4 + column;
  return ((row / 128) * tiles + tile) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column;
}

// The codes against what the kernel itself normed: that has a check of its own.
template <typename Output>
bool check_codes(const Call& call, uint32_t rank, float global, const Results& results) {
  const int hidden = call.hidden;
  for (int row = 0; row < call.rows; ++row) {
    const BF16* y = &results.norm[row * hidden];
    double scale = global;
    if constexpr (std::is_same_v<Output, row_output::row_e4m3>) {
      double amax = 0;
      for (int i = 0; i < hidden; ++i) amax = std::fmax(amax, std::fabs(to_float(y[i])));
      scale = results.row_scales[row];
      if (std::fabs(scale - amax / 448) > 1e-6 * scale)
        return complain(rank, "scale of row", row, scale, amax / 448);
    }
    for (int i = 0; i < hidden; ++i) {
      const int64_t index = int64_t{row} * hidden + i;
      if constexpr (Output::kGroupSize != 16) {
        if (!is_nearest_e4m3(results.codes[index], to_float(y[i]) / scale))
          return complain(rank, "e4m3 code", index, e4m3_value(results.codes[index]),
                          to_float(y[i]) / scale);
      } else {
        double amax = 0;
        for (int j = i / 16 * 16; j < i / 16 * 16 + 16; ++j)
          amax = std::fmax(amax, std::fabs(to_float(y[j])));
        const uint8_t stored = results.scales[scale_offset<Output>(row, i / 16, hidden / 16)];
        if (!is_nearest_e4m3(stored, global * amax / 6))
          return complain(rank, "scale of group", index, e4m3_value(stored), global * amax / 6);
        const int code = results.codes[index / 2] >> (index % 2 * 4) & 15;
        const double scaled = stored == 0 ? 0 : to_float(y[i]) * global / e4m3_value(stored);
        if (!is_nearest_e2m1(code, scaled)) return complain(rank, "e2m1 code", index, code, scaled);
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace flashinfer
