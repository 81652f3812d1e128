// Random products of one row, emulated on the CPU, against loops in double precision. Each CTA is a
// cluster of its own here.
//
//   one_row_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/gemm/one_row.cuh>

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

template <int kColumns, bool kNorm>
bool check(Random& random) {
  const int n = 8 * random.integer(1, 40), k = 8 * random.integer(1, 90);
  const int stride = n + 8 * random.integer(0, 2);
  Array a(random, k), b(random, static_cast<size_t>(k) * stride), bias(random, n), out(random, n);
  OneRowParams params = {};
  params.a = a.data();
  params.b = b.data();
  params.b_stride = stride;
  params.bias = random.one_in(2) ? bias.data() : nullptr;
  params.out = out.data();
  params.n = n;
  params.k = k;
  params.weight_ready = random.one_in(2);
  Array residual(random, k), weight(random, k), total(random, k), normed(random, k);
  params.residual = residual.data();
  params.norm_weight = weight.data();
  params.residual_out = total.data();
  params.normed = normed.data();
  params.eps = 0.1f;
  launch_one_row<OneRowTraits<BF16, kColumns, kNorm>>(params, 1, false, nullptr);
  if (kNorm) {
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
    a = normed;
  }
  for (int c = 0; c < n; ++c) {
    double y = params.bias != nullptr ? bias[c] : 0., size = std::fabs(y);
    for (int i = 0; i < k; ++i) {
      const double term = a[i] * b[static_cast<size_t>(i) * stride + c];
      y += term;
      size += std::fabs(term);
    }
    if (std::fabs(out[c] - y) <= 0.004 * std::fabs(y) + 1e-5 * size) continue;
    std::printf("%d x %d, column %d: got %g, expected %g\n", n, k, c, out[c], y);
    return false;
  }
  return true;
}

}  // namespace
}  // namespace flashinfer

int main(int, char** argv) {
  using namespace flashinfer;
  return run_cases(std::atoi(argv[1]), Random(7), [](Random& random) {
    return check<64, false>(random) && check<128, false>(random) && check<64, true>(random) &&
           check<128, true>(random);
  });
}
