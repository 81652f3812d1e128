// Random experts of one token, emulated on the CPU, against loops in double precision.
//
//   moe_token_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/moe/one_token.cuh>

#include <vector>

#include "random.h"

namespace flashinfer {
namespace {

using BF16 = dtype::bfloat16;

// Numbers, and NaN after them.
struct Array {
  std::vector<uint4> storage;
  Array(Random& random, size_t size, double factor = 1.)
      : storage(size / 8 + 512, uint4{~0u, ~0u, ~0u, ~0u}) {
    for (size_t i = 0; i < size; ++i) data()[i] = from_float<BF16>(factor * random.normal());
  }
  BF16* data() { return reinterpret_cast<BF16*>(storage.data()); }
  double operator[](size_t i) { return to_float(data()[i]); }
};

template <typename Index>
bool check(Random& random) {
  const int size = 8 * (random.one_in(4) ? random.integer(250, 300) : random.integer(1, 60));
  const int inner = 8 * random.integer(1, 70), num_experts = random.integer(1, 6);
  const int first = random.one_in(2) ? 0 : random.integer(1, 4), everywhere = 12;
  const int top_k = random.integer(1, 5);
  Array x(random, size), out(random, size), hidden(random, top_k * inner);
  Array fc1(random, 2ull * num_experts * inner * size, 1. / std::sqrt(size));
  Array fc2(random, 1ull * num_experts * inner * size, 1. / std::sqrt(inner));
  std::vector<int64_t> experts(top_k);
  std::vector<float> weights(top_k);
  for (float& weight : weights) weight = random.normal();
  for (int64_t& expert : experts) expert = random.integer(-1, everywhere - 1);
  const std::vector<Index> numbers(experts.begin(), experts.end());

  MoeTokenParams params = {};
  params.x = x.data();
  params.fc1 = fc1.data();
  params.fc2 = fc2.data();
  params.experts = numbers.data();
  params.weights = weights.data();
  params.hidden = hidden.data();
  params.out = out.data();
  params.first_expert = first;
  params.num_experts = num_experts;
  params.top_k = top_k;
  params.size = size;
  params.inner = inner;
  using Traits = MoeTokenTraits<BF16, Index>;
  launch_moe_token<Traits>(params, random.integer(1, 3), false, nullptr);

  std::vector<double> expected(size), magnitude(size);
  for (int j = 0; j < top_k; ++j) {
    const int64_t e = experts[j] - first;
    if (e < 0 || e >= num_experts) continue;
    std::vector<double> between(inner);
    for (int i = 0; i < inner; ++i) {
      double value = 0., gate = 0.;
      for (int c = 0; c < size; ++c) {
        value += x[c] * fc1[(2 * e * inner + i) * size + c];
        gate += x[c] * fc1[((2 * e + 1) * inner + i) * size + c];
      }
      between[i] = gate / (1. + std::exp(-gate)) * value;
    }
    for (int c = 0; c < size; ++c) {
      for (int i = 0; i < inner; ++i) {
        const double term = weights[j] * between[i] * fc2[(e * size + c) * inner + i];
        expected[c] += term;
        magnitude[c] += std::fabs(term);
      }
    }
  }
  for (int c = 0; c < size; ++c) {
    const double got = out[c];
    if (std::fabs(got - expected[c]) <= 0.004 * std::fabs(got) + 0.0025 * magnitude[c]) continue;
    std::printf("%d experts of %d x %d, element %d: got %g, expected %g\n", top_k, size, inner, c,
                got, expected[c]);
    return false;
  }
  return true;
}

}  // namespace
}  // namespace flashinfer

int main(int, char** argv) {
  using namespace flashinfer;
  return run_cases(std::atoi(argv[1]), Random(5),
                   [](Random& random) { return check<int32_t>(random) && check<int64_t>(random); });
}
