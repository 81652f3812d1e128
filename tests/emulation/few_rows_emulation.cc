// Random products of few rows, emulated on the CPU, against loops in double precision. Each CTA is
// a cluster of its own here; with a norm several divide k.
//
//   few_rows_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/gemm/few_rows.cuh>

#include <random>
#include <vector>

#include "random.h"

namespace flashinfer {
namespace {

using BF16 = dtype::bfloat16;

// Numbers in rows, and NaN beside and after them.
struct Matrix {
  int stride;
  std::vector<uint4> storage;
  Matrix(Random& random, int rows, int columns)
      : stride(columns + 8 * random.integer(0, 2)),
        storage(static_cast<size_t>(rows) * stride / 8 + 64, uint4{~0u, ~0u, ~0u, ~0u}) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) at(r, c) = from_float<BF16>(random.normal());
    }
  }
  BF16* data() { return reinterpret_cast<BF16*>(storage.data()); }
  BF16& at(int row, int column) { return data()[static_cast<size_t>(row) * stride + column]; }
  double operator()(int row, int column) { return to_float(at(row, column)); }
};

bool near(const char* what, int row, int column, double got, double expected, double bound) {
  if (std::fabs(got - expected) <= bound) return true;
  std::printf("%s: row %d, column %d: got %g, expected %g\n", what, row, column, got, expected);
  return false;
}

template <int kColumns, FewRowsOutput kOutput>
bool check(Random& random) {
  constexpr bool kGated = kOutput == FewRowsOutput::kGated;
  constexpr bool kNorm = kOutput == FewRowsOutput::kNorm;
  const int m = random.integer(1, 8);
  const int n = kNorm ? 256 * random.integer(1, 2) : kColumns * random.integer(1, 3);
  const int k = 16 * random.integer(1, random.one_in(3) ? 60 : 20);
  Matrix a(random, m, k), b(random, k, n), bias(random, 1, n), out(random, m, n);
  Matrix residual(random, m, n), weight(random, 1, n), before = residual;
  FewRowsParams params = {};
  params.a = a.data();
  params.b = b.data();
  params.bias = kOutput == FewRowsOutput::kProduct && random.one_in(2) ? bias.data() : nullptr;
  params.out = out.data();
  params.a_stride = a.stride;
  params.b_stride = b.stride;
  params.out_stride = out.stride;
  params.m = m;
  params.n = n;
  params.k = k;
  params.splits = kNorm ? random.integer(1, 8) : 1;
  params.weight_ready = random.one_in(2);
  std::vector<float4> parts(static_cast<size_t>(params.splits) * m * n / 4);
  params.parts = reinterpret_cast<float*>(parts.data());
  params.residual = residual.data();
  params.residual_stride = residual.stride;
  params.norm_weight = weight.data();
  params.eps = 0.01f;
  launch_few_rows<FewRowsTraits<BF16, kColumns, kOutput>>(params, false, nullptr);
  std::vector<double> sums(n), sizes(n);
  for (int r = 0; r < m; ++r) {
    double squares = 0.;
    for (int c = 0; c < n; ++c) {
      sums[c] = kNorm ? before(r, c) : params.bias != nullptr ? bias(0, c) : 0.;
      sizes[c] = std::fabs(sums[c]);
      for (int i = 0; i < k; ++i) {
        sums[c] += a(r, i) * b(i, c);
        sizes[c] += std::fabs(a(r, i) * b(i, c));
      }
      squares += sums[c] * sums[c];
    }
    const double scale = 1 / std::sqrt(squares / n + params.eps);
    for (int c = 0; c < (kGated ? n / 2 : n); ++c) {
      double y = sums[c], size = sizes[c];
      if (kNorm) {
        if (!near("sum", r, c, residual(r, c), y, 0.004 * std::fabs(y) + 1e-5 * size)) return false;
        y *= scale * weight(0, c);
        size *= scale * std::fabs(weight(0, c));
      }
      if (kGated) {
        y *= sums[c + n / 2] / (1 + std::exp(-sums[c]));
        size = (size + 1) * (sizes[c + n / 2] + 1);
      }
      if (!near("result", r, c, out(r, c), y, 0.004 * std::fabs(y) + 2e-5 * size)) return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace flashinfer

int main(int, char** argv) {
  using namespace flashinfer;
  return run_cases(std::atoi(argv[1]), Random(7), [](Random& random) {
    return check<64, FewRowsOutput::kProduct>(random) &&
           check<128, FewRowsOutput::kProduct>(random) &&
           check<128, FewRowsOutput::kGated>(random) && check<64, FewRowsOutput::kNorm>(random) &&
           check<128, FewRowsOutput::kNorm>(random);
  });
}
