// Random mixtures through the kernels of flashinfer/moe, emulated on the CPU, against loops in
// double precision.
//
//   moe_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/moe/combine.cuh>
#include <flashinfer/moe/map.cuh>
#include <flashinfer/moe/route.cuh>

#include <numeric>
#include <vector>

#include "random.h"

namespace flashinfer {
namespace {

using BF16 = dtype::bfloat16;

bool complain(const char* what, int index, double got, double expected) {
  std::printf("%s %d: got %g, expected %g\n", what, index, got, expected);
  return false;
}

// Choices with repeated experts, experts that are elsewhere, and numbers that no expert has.
template <typename Id>
bool check_map(Random& random) {
  const int tokens = random.one_in(8) ? random.integer(200, 900) : random.integer(1, 40);
  const int top_k = random.integer(1, 9), num_experts = random.integer(1, 300);
  const int first = random.one_in(2) ? 0 : random.integer(1, 500);
  const int skew = random.one_in(3) ? 3 : num_experts + 20;
  const int entries = tokens * top_k;
  std::vector<Id> experts(entries);
  for (Id& expert : experts) {
    expert = random.one_in(9) ? Id{-1} : static_cast<Id>(first - 10 + random.integer(0, skew));
    if (sizeof(Id) == 8 && random.one_in(30)) expert = static_cast<Id>(1) << 32 | first;
  }
  std::vector<int32_t> offsets(num_experts + 1, -7), row_token(entries, -7), entry_row(entries, -7);
  MoeMapParams params = {};
  params.experts = experts.data();
  params.num_entries = entries;
  params.top_k = top_k;
  params.first_expert = first;
  params.num_experts = num_experts;
  params.offsets = offsets.data();
  params.row_token = row_token.data();
  params.entry_row = entry_row.data();
  launch_moe_map<Id>(params, false, nullptr);

  int row = 0;
  for (int expert = 0; expert < num_experts; ++expert) {
    if (offsets[expert] != row) return complain("offset", expert, offsets[expert], row);
    for (int i = 0; i < entries; ++i) {
      if (experts[i] != static_cast<Id>(first + expert)) continue;
      if (entry_row[i] != row) return complain("row of entry", i, entry_row[i], row);
      if (row_token[row] != i / top_k)
        return complain("token of row", row, row_token[row], i / top_k);
      ++row;
    }
  }
  if (offsets[num_experts] != row) return complain("rows", num_experts, offsets[num_experts], row);
  for (int i = 0; i < entries; ++i) {
    const bool is_here = experts[i] >= first && experts[i] < static_cast<Id>(first) + num_experts;
    if (!is_here && entry_row[i] != -1) return complain("entry elsewhere", i, entry_row[i], -1);
  }
  for (int i = row; i < entries; ++i) {
    if (row_token[i] != -7) return complain("after the last row", i, row_token[i], -7);
  }
  return true;
}

bool check_combine(Random& random) {
  const int tokens = random.integer(1, 5), top_k = random.integer(1, 10);
  const int hidden = 8 * random.integer(1, 300), num_rows = random.integer(1, 30);
  const int stride = hidden + 8 * random.integer(0, 2);
  std::vector<BF16> rows(num_rows * stride), out(tokens * stride, BF16{0x7fff});
  for (BF16& value : rows) value = from_float<BF16>(random.normal(1.f));
  std::vector<int32_t> entry_row(tokens * top_k);
  std::vector<float> weights(tokens * top_k);
  constexpr int32_t kNone[] = {-1, INT32_MIN, INT32_MAX};
  for (int32_t& row : entry_row) {
    row = random.one_in(4) ? kNone[random.integer(0, 2)] : random.integer(0, num_rows);
  }
  for (float& weight : weights) weight = random.normal(1.f);
  MoeCombineParams params = {};
  params.rows = rows.data();
  params.rows_stride = params.out_stride = stride;
  params.entry_row = entry_row.data();
  params.weights = weights.data();
  params.out = out.data();
  params.num_rows = num_rows;
  params.num_tokens = tokens;
  params.top_k = top_k;
  params.hidden = hidden;
  launch_moe_combine<BF16, BF16>(params, false, nullptr);
  for (int i = 0; i < tokens * stride; ++i) {
    const int token = i / stride, column = i % stride;
    double expected = 0., magnitude = 0.;
    for (int j = 0; j < top_k; ++j) {
      const int row = entry_row[token * top_k + j];
      if (row < 0 || row >= num_rows) continue;
      const double term = weights[token * top_k + j] * to_float(rows[row * stride + column]);
      expected += term;
      magnitude += std::fabs(term);
    }
    if (column >= hidden) {
      if (out[i].bits != 0x7fff) return complain("padding", i, out[i].bits, 0x7fff);
    } else if (!(std::fabs(to_float(out[i]) - expected) <=
                 std::fabs(expected) / 256 + magnitude * 1e-6)) {
      return complain("sum", i, to_float(out[i]), expected);
    }
  }
  return true;
}

double score_of(MoeScore kind, const std::vector<float>& logits, int expert) {
  if (kind == MoeScore::sigmoid) return 1. / (1. + std::exp(-double{logits[expert]}));
  double sum = 0.;
  for (float logit : logits) sum += std::exp(double{logit} - logits[expert]);
  return 1. / sum;
}

// The experts are checked by what they are compared by, so that roundings of scores that are next
// to each other may exchange them.
template <MoeScore kScore, int kPerLane>
bool check_route(Random& random) {
  const int groups = random.one_in(2) ? 1 : random.integer(2, 8);
  const int size = random.integer(1, 32 * kPerLane / groups), experts = groups * size;
  const int top_groups = groups == 1 ? 1 : random.integer(1, groups);
  const int top_k = random.integer(1, std::min(12, top_groups * size));
  const int tokens = random.integer(1, 9), stride = experts + random.integer(0, 3);
  std::vector<float> logits(tokens * stride), bias(experts), weights(tokens * top_k, NAN);
  for (float& logit : logits) logit = random.normal(2.f);
  for (float& value : bias) value = random.normal(0.3f);
  std::vector<int32_t> chosen(tokens * top_k, -7);
  MoeRouteParams params = {};
  params.logits = logits.data();
  params.logits_stride = stride;
  params.bias = random.one_in(2) ? bias.data() : nullptr;
  params.weights = weights.data();
  params.experts = chosen.data();
  params.num_tokens = tokens;
  params.num_experts = experts;
  params.top_k = top_k;
  params.num_groups = groups;
  params.top_groups = top_groups;
  params.renormalize = random.one_in(2);
  params.scale = random.one_in(2) ? 1.f : 2.5f;
  launch_moe_route<float, kScore, kPerLane>(params, false, nullptr);
  for (int token = 0; token < tokens; ++token) {
    const std::vector<float> own(&logits[token * stride], &logits[token * stride] + experts);
    std::vector<double> score(experts), compared(experts);
    for (int e = 0; e < experts; ++e) {
      score[e] = score_of(kScore, own, e);
      compared[e] = score[e] + (params.bias != nullptr ? bias[e] : 0.f);
    }
    std::vector<double> group_score(groups);
    for (int g = 0; g < groups; ++g) {
      std::vector<double> of_group(&compared[g * size], &compared[g * size] + size);
      std::sort(of_group.rbegin(), of_group.rend());
      group_score[g] = of_group[0] + (size > 1 ? of_group[1] : 0.);
    }
    std::vector<int> order(groups);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return group_score[a] > group_score[b]; });
    std::vector<int> eligible;
    for (int g = 0; g < top_groups; ++g) {
      for (int e = 0; e < size; ++e) eligible.push_back(order[g] * size + e);
    }
    std::sort(eligible.begin(), eligible.end(),
              [&](int a, int b) { return compared[a] > compared[b]; });
    double total = 0.;
    for (int j = 0; j < top_k; ++j) total += score[eligible[j]];
    for (int j = 0; j < top_k; ++j) {
      const int got = chosen[token * top_k + j];
      if (got < 0 || got >= experts) return complain("expert", j, got, eligible[j]);
      if (std::fabs(compared[got] - compared[eligible[j]]) > 1e-5)
        return complain("choice", j, compared[got], compared[eligible[j]]);
      for (int i = 0; i < j; ++i) {
        if (chosen[token * top_k + i] == got) return complain("chosen twice", j, got, -1);
      }
      const double expected = score[got] * params.scale / (params.renormalize ? total : 1.);
      if (!(std::fabs(weights[token * top_k + j] - expected) <= 1e-5 * (1. + expected)))
        return complain("weight", j, weights[token * top_k + j], expected);
    }
  }
  return true;
}

// Equal scores: the lower numbers, in order. A NaN comes first and spoils the weights.
bool check_special_logits() {
  std::vector<float> logits(64, 1.f), weights(4);
  std::vector<int32_t> chosen(4, -7);
  MoeRouteParams params = {};
  params.logits = logits.data();
  params.weights = weights.data();
  params.experts = chosen.data();
  params.num_tokens = 1;
  params.num_experts = 64;
  params.top_k = 4;
  params.num_groups = params.top_groups = 1;
  params.renormalize = true;
  params.scale = 1.f;
  launch_moe_route<float, MoeScore::softmax, 2>(params, false, nullptr);
  for (int j = 0; j < 4; ++j) {
    if (chosen[j] != j) return complain("equal scores", j, chosen[j], j);
  }
  logits[40] = NAN;
  launch_moe_route<float, MoeScore::sigmoid, 2>(params, false, nullptr);
  if (chosen[0] != 40) return complain("NaN", 0, chosen[0], 40);
  if (!std::isnan(weights[3])) return complain("weight beside NaN", 3, weights[3], NAN);
  return true;
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  using namespace flashinfer;
  const int cases = argc > 1 ? std::atoi(argv[1]) : 1;
  Random random(11);
  if (!check_special_logits()) return 1;
  for (int i = 0; i < cases; ++i) {
    const bool right =
        check_map<int32_t>(random) && check_map<int64_t>(random) && check_combine(random) &&
        check_route<MoeScore::softmax, 1>(random) && check_route<MoeScore::softmax, 4>(random) &&
        check_route<MoeScore::sigmoid, 8>(random) && check_route<MoeScore::sigmoid, 2>(random);
    if (!right) {
      std::printf("in case %d\n", i);
      return 1;
    }
  }
  return 0;
}
