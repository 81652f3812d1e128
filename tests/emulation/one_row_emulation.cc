// Random products of one row, emulated on the CPU, against loops in double precision. Each CTA is a
// cluster of its own here.
//
//   one_row_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/gemm/one_row_heads.cuh>
#include <flashinfer/gemm/one_row_route.cuh>

#include <algorithm>
#include <random>
#include <vector>

#include "random.h"

namespace flashinfer {
namespace {

using BF16 = dtype::bfloat16;

// Numbers, and NaN after them.
struct Array {
  std::vector<uint4> storage;
  Array(Random& random, size_t size) : storage(size / 8 + 512, uint4{~0u, ~0u, ~0u, ~0u}) {
    for (size_t i = 0; i < size; ++i) data()[i] = from_float<BF16>(random.normal());
  }
  BF16* data() { return reinterpret_cast<BF16*>(storage.data()); }
  double operator[](size_t i) { return to_float(data()[i]); }
};

// A row, weights and what else the kernels of every end read.
struct Case {
  int n, k, stride;
  Array a, b, bias, out, residual, weight, total, normed;

  Case(Random& random, int n, int k)
      : n(n),
        k(k),
        stride(n + 8 * random.integer(0, 2)),
        a(random, k),
        b(random, static_cast<size_t>(k) * stride),
        bias(random, n),
        out(random, n),
        residual(random, k),
        weight(random, k),
        total(random, k),
        normed(random, k) {}

  void fill(OneRowParams& params, Random& random) {
    params.a = a.data();
    params.b = b.data();
    params.b_stride = stride;
    params.bias = random.one_in(2) ? bias.data() : nullptr;
    params.out = out.data();
    params.n = n;
    params.k = k;
    params.weight_ready = random.one_in(2);
    params.residual = residual.data();
    params.norm_weight = weight.data();
    params.residual_out = total.data();
    params.normed = normed.data();
    params.eps = 0.1f;
  }

  bool has_norm() {
    double squares = 0.;
    for (int i = 0; i < k; ++i) squares += (a[i] + residual[i]) * (a[i] + residual[i]);
    for (int i = 0; i < k; ++i) {
      const double sum = a[i] + residual[i];
      const double expected = sum / std::sqrt(squares / k + 0.1) * weight[i];
      const bool right = std::fabs(total[i] - sum) <= 0.004 * std::fabs(sum) &&
                         std::fabs(normed[i] - expected) <= 0.0041 * std::fabs(expected) + 1e-6;
      if (!right) {
        std::printf("norm of %d, element %d: got %g, expected %g\n", k, i, normed[i], expected);
        return false;
      }
    }
    return true;
  }

  // The product of a row, and the size of its terms.
  std::pair<double, double> product(Array& row, const OneRowParams& params, int c) {
    double y = params.bias != nullptr ? bias[c] : 0., size = std::fabs(y);
    for (int i = 0; i < k; ++i) {
      const double term = row[i] * b[static_cast<size_t>(i) * stride + c];
      y += term;
      size += std::fabs(term);
    }
    return {y, size};
  }

  bool has_product(Array& row, const OneRowParams& params) {
    for (int c = 0; c < n; ++c) {
      const auto [y, size] = product(row, params, c);
      if (std::fabs(out[c] - y) <= 0.004 * std::fabs(y) + 1e-5 * size) continue;
      std::printf("%d x %d, column %d: got %g, expected %g\n", n, k, c, out[c], y);
      return false;
    }
    return true;
  }
};

template <int kColumns, bool kNorm>
bool check(Random& random) {
  const int n = 8 * random.integer(1, 40);
  Case test(random, n, 8 * random.integer(1, 90));
  OneRowParams params = {};
  test.fill(params, random);
  launch_one_row<OneRowTraits<BF16, kColumns, kNorm>>(params, 1, false, nullptr);
  if (kNorm && !test.has_norm()) return false;
  return test.has_product(kNorm ? test.normed : test.a, params);
}

// Few experts of one token.
template <int kColumns>
bool check_route(Random& random) {
  const int n = 8 * random.integer(1, kColumns / 8);
  Case test(random, n, 8 * random.integer(1, 90));
  const int top_k = random.integer(1, std::min(n, 32));
  std::vector<float> weights(top_k, -7.f);
  std::vector<int32_t> experts(top_k, -7);
  OneRowRouteParams params = {};
  test.fill(params, random);
  params.weights = weights.data();
  params.experts = experts.data();
  params.top_k = top_k;
  params.renormalize = random.one_in(2);
  params.scale = 1.5f;
  launch_one_row_route<BF16, kColumns>(params, 1, false, nullptr);
  if (!test.has_norm() || !test.has_product(test.normed, params)) return false;
  double all = 0., chosen = 0.;
  std::vector<int> order(n);
  double largest = -INFINITY;
  for (int i = 0; i < n; ++i) largest = std::max(largest, test.out[order[i] = i]);
  for (int i = 0; i < n; ++i) all += std::exp(test.out[i] - largest);
  std::stable_sort(order.begin(), order.end(),
                   [&](int i, int j) { return test.out[i] > test.out[j]; });
  for (int j = 0; j < top_k; ++j) chosen += std::exp(test.out[order[j]] - largest);
  for (int j = 0; j < top_k; ++j) {
    const double share = std::exp(test.out[order[j]] - largest);
    const double weight = 1.5 * share / (params.renormalize ? chosen : all);
    if (experts[j] != order[j]) {
      std::printf("choice %d of %d: got %d, expected %d\n", j, n, experts[j], order[j]);
      return false;
    }
    if (std::fabs(weights[j] - weight) <= 1e-4 * weight + 1e-12) continue;
    std::printf("weight %d of %d: got %g, expected %g\n", j, n, weights[j], weight);
    return false;
  }
  return true;
}

// Heads of one token, whose keys and values go to a paged cache.
template <int kColumns, bool kInterleave>
bool check_heads(Random& random) {
  constexpr int kSlots = 4, kPages = 6, kPositions = 40;
  const int queries = random.integer(1, 3), heads = random.integer(1, 2);
  Case test(random, (queries + 2 * heads) * kColumns, 8 * random.integer(1, 40));
  OneRowHeadsParams params = {};
  test.fill(params, random);
  RopeParams& rope = params.rope;
  Array q(random, queries * kColumns), weights(random, 2 * kColumns);
  const size_t cached = size_t{kPages} * kSlots * heads * kColumns;
  Array keys(random, cached), values(random, cached);
  const std::vector<uint4> before[2] = {keys.storage, values.storage};
  std::vector<float> angles(kPositions * kColumns);
  for (float& x : angles) x = random.normal();
  const int32_t position = random.integer(0, kPositions - 1), slot = random.integer(0, 11);
  const int32_t request = random.integer(0, 1), indptr[3] = {0, 3, 6};
  const int32_t indices[kPages] = {4, 1, 0, 5, 3, 2};
  rope.num_segments = 3;
  const int counts[3] = {queries, heads, heads};
  BF16* const rows[3] = {q.data(), keys.data(), values.data()};
  const bool has_norm = random.one_in(2);
  for (int i = 0; i < 3; ++i) {
    RopeSegment& segment = rope.segments[i];
    segment.out.data = rows[i];
    segment.out.stride_head = kColumns;
    segment.out.stride_token = heads * kColumns;
    segment.out.stride_page = kSlots * heads * kColumns;
    segment.num_heads = counts[i];
    segment.dim = kColumns;
    segment.rotates = i < 2;
    segment.appends = i > 0;
    segment.scale = i == 2 ? 2.f : 1.f;
    if (has_norm && i < 2) segment.norm_weight = weights.data() + i * kColumns;
  }
  rope.num_tokens = 1;
  rope.rope_dim = kColumns;
  rope.pos_ids = &position;
  rope.cos_sin_cache = angles.data();
  rope.cos_sin_stride = kColumns;
  rope.cache_rows = kPositions;
  rope.norm_eps = 0.2f;
  rope.table.batch_size = 2;
  rope.table.batch_indices = &request;
  rope.table.positions = &slot;
  rope.table.indices = indices;
  rope.table.indptr = indptr;
  rope.table.num_indices = kPages;
  rope.table.num_pages = kPages;
  rope.table.page_size = FastDivisor(kSlots);
  using Rope = RopeTraits<BF16, BF16, float, kInterleave, true, true>;
  if (launch_one_row_heads<Rope, kColumns>(params, 1, false, nullptr) != cudaSuccess) return false;
  if (!test.has_norm()) return false;

  const size_t row =
      (size_t{static_cast<size_t>(indices[3 * request + slot / kSlots])} * kSlots + slot % kSlots) *
      heads * kColumns;
  for (int head = 0; head < queries + 2 * heads; ++head) {
    const int which = head < queries ? 0 : head < queries + heads ? 1 : 2;
    const int number = head - (which > 0 ? queries : 0) - (which == 2 ? heads : 0);
    double x[kColumns], largest = 0., squares = 0.;
    for (int i = 0; i < kColumns; ++i) {
      const auto [y, size] = test.product(test.normed, params, head * kColumns + i);
      x[i] = y;
      squares += y * y;
      largest = std::max(largest, size);
    }
    double factor = 1.;
    if (which < 2 && has_norm) {
      factor = 1. / std::sqrt(squares / kColumns + 0.2);
      for (int i = 0; i < kColumns; ++i) x[i] *= factor * weights[which * kColumns + i];
    }
    double size = 0.;
    for (int i = 0; i < kColumns; ++i) size = std::max(size, std::fabs(x[i]));
    for (int i = 0; i < kColumns; ++i) {
      double expected = which == 2 ? 2. * x[i] : 0.;
      if (which < 2) {
        const int pair = kInterleave ? i / 2 : i % (kColumns / 2);
        const bool is_first = kInterleave ? i % 2 == 0 : i < kColumns / 2;
        const double a = x[kInterleave ? 2 * pair : pair];
        const double b = x[kInterleave ? 2 * pair + 1 : pair + kColumns / 2];
        const double cos = angles[position * kColumns + pair];
        const double sin = angles[position * kColumns + kColumns / 2 + pair];
        expected = is_first ? a * cos - b * sin : b * cos + a * sin;
      }
      Array& made = which == 0 ? q : which == 1 ? keys : values;
      const double got = made[(which == 0 ? 0 : row) + number * kColumns + i];
      const double bound = 0.004 * std::fabs(expected) + 1e-4 * size + 4e-5 * factor * largest;
      if (std::fabs(got - expected) <= bound) continue;
      std::printf("head %d of %d, element %d: got %g, expected %g\n", head, queries, i, got,
                  expected);
      return false;
    }
  }
  for (int i = 0; i < 2; ++i) {
    Array& made = i == 0 ? keys : values;
    for (size_t at = 0; at < cached; ++at) {
      if (at >= row && at < row + heads * kColumns) continue;
      const BF16 left = reinterpret_cast<const BF16*>(before[i].data())[at];
      if (made.data()[at].bits == left.bits) continue;
      std::printf("element %d of the cache is not the token's\n", static_cast<int>(at));
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace flashinfer

int main(int, char** argv) {
  using namespace flashinfer;
  return run_cases(std::atoi(argv[1]), Random(7), [](Random& random) {
    return check<64, false>(random) && check<128, false>(random) && check<64, true>(random) &&
           check<128, true>(random) && check_route<64>(random) && check_route<128>(random) &&
           check_heads<64, false>(random) && check_heads<128, false>(random) &&
           check_heads<64, true>(random) && check_heads<128, true>(random);
  });
}
