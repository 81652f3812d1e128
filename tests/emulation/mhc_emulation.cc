// Random tokens through the mappings of hyper-connections, emulated on the CPU, against loops in
// double precision.
//
//   mhc_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/mhc/mhc_post.cuh>
#include <flashinfer/mhc/mhc_pre.cuh>

#include <random>
#include <vector>

namespace flashinfer {
namespace {

using BF16 = dtype::bfloat16;
constexpr int n = kMhcStreams;

struct Random {
  std::mt19937 engine{7};
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  float normal(float scale) { return scale * std::normal_distribution<float>()(engine); }
};

template <typename T>
struct Array {
  std::vector<uint4> storage;
  Array(Random& random, size_t size, float scale = 1.f) : storage(size * sizeof(T) / 16 + 1) {
    for (size_t i = 0; i < size; ++i) data()[i] = from_float<T>(random.normal(scale));
  }
  T* data() { return reinterpret_cast<T*>(storage.data()); }
  double operator[](size_t i) { return to_float(data()[i]); }
};

bool is_close(const char* what, int token, int at, double got, double expected, double relative) {
  if (std::fabs(got - expected) <= relative * (std::fabs(expected) + 0.1)) return true;
  std::printf("%s [%d, %d]: got %g, expected %g\n", what, token, at, got, expected);
  return false;
}

bool check_post(Random& random) {
  const int tokens = random.integer(1, 9), hidden = 8 * random.integer(1, 60);
  Array<BF16> x(random, tokens * hidden), residual(random, tokens * n * hidden);
  Array<BF16> out(random, tokens * n * hidden);
  Array<float> post(random, tokens * n), comb(random, tokens * n * n);
  MhcPostParams params = {};
  params.x = x.data();
  params.residual = residual.data();
  params.post_mix = post.data();
  params.comb_mix = comb.data();
  params.out = out.data();
  params.num_tokens = tokens;
  params.hidden_size = hidden;
  launch_mhc_post<BF16>(params, false, nullptr);
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < n * hidden; ++i) {
      const int to = i / hidden, column = i % hidden;
      double y = post[t * n + to] * x[t * hidden + column], size = std::fabs(y);
      for (int m = 0; m < n; ++m) {
        const double part = comb[(t * n + m) * n + to] * residual[(t * n + m) * hidden + column];
        y += part;
        size += std::fabs(part);
      }
      const double got = out[t * n * hidden + i];
      if (std::fabs(got - y) > 0.004 * std::fabs(y) + 1e-5 * size) {
        return is_close("stream", t, i, got, y, 0);
      }
    }
  }
  return true;
}

// Sinkhorn as the paper has it: every entry is divided, nothing is kept as a factor.
void sinkhorn(double (&m)[n][n], int repeat, double eps) {
  for (int i = 0; i < n; ++i) {
    double total = 0;
    for (double& value : m[i]) total += value = std::exp(value);
    for (double& value : m[i]) value = value / total + eps;
  }
  for (int step = 0; step < 2 * repeat - 1; ++step) {
    for (int a = 0; a < n; ++a) {
      double total = eps;
      for (int b = 0; b < n; ++b) total += step % 2 ? m[a][b] : m[b][a];
      for (int b = 0; b < n; ++b) (step % 2 ? m[a][b] : m[b][a]) /= total;
    }
  }
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

template <bool kPrenorm>
bool check_pre(Random& random) {
  const int tokens = random.integer(1, 6), hidden = 8 * random.integer(1, 200);
  const int splits = kPrenorm ? 1 : random.integer(1, 40), mixes = kMhcMixes;
  Array<float> dots(random, splits * tokens * mixes, 2.f / splits);
  Array<float> squares(random, splits * tokens, 2.f * n * hidden / splits);
  Array<BF16> residual(random, tokens * n * hidden), input(random, tokens * hidden);
  Array<float> scale(random, 3), base(random, mixes), post(random, tokens * n);
  Array<float> comb(random, tokens * n * n);
  for (int i = 0; i < splits * tokens; ++i) squares.data()[i] = std::fabs(squares.data()[i]);
  MhcPreParams params = {};
  params.dot_mix = dots.data();
  params.sqrsum = kPrenorm ? nullptr : squares.data();
  params.residual = residual.data();
  params.scale = scale.data();
  params.base = base.data();
  params.post_mix = post.data();
  params.comb_mix = comb.data();
  params.layer_input = input.data();
  params.num_tokens = tokens;
  params.hidden_size = hidden;
  params.num_splits = splits;
  params.sinkhorn_repeat = random.integer(1, 20);
  params.block_size = 32 * (random.integer(0, 1) ? 0 : random.integer(2, 6));
  params.inv_k = 1.f / (n * hidden);
  params.rms_eps = 1e-3f;
  params.pre_eps = 1e-2f;
  params.sinkhorn_eps = 1e-2f;
  params.post_mult = 2.f;
  DeviceInfo device;
  device.num_sms = random.integer(1, 10);
  launch_mhc_pre<BF16, kPrenorm>(params, device, false, nullptr);
  for (int t = 0; t < tokens; ++t) {
    double total = 0, mix[24] = {}, m[n][n];
    for (int i = 0; kPrenorm && i < n * hidden; ++i) {
      total += residual[t * n * hidden + i] * residual[t * n * hidden + i];
    }
    for (int s = 0; s < splits; ++s) {
      if (!kPrenorm) total += squares[s * tokens + t];
      for (int i = 0; i < mixes; ++i) mix[i] += dots[(s * tokens + t) * mixes + i];
    }
    for (int i = 0; i < mixes; ++i) {
      mix[i] *= scale[i < 4 ? 0 : i < 8 ? 1 : 2] / std::sqrt(total * params.inv_k + params.rms_eps);
      mix[i] += base[i];
    }
    for (int i = 0; i < n * n; ++i) m[i / n][i % n] = mix[8 + i];
    sinkhorn(m, params.sinkhorn_repeat, params.sinkhorn_eps);
    for (int i = 0; i < n; ++i) {
      if (!is_close("post_mix", t, i, post[t * n + i], 2 * sigmoid(mix[4 + i]), 1e-4)) return false;
    }
    for (int i = 0; i < n * n; ++i) {
      if (!is_close("comb_mix", t, i, comb[t * n * n + i], m[i / n][i % n], 1e-3)) return false;
    }
    for (int i = 0; i < hidden; ++i) {
      double y = 0, size = 0;
      for (int s = 0; s < n; ++s) {
        const double part = (sigmoid(mix[s]) + params.pre_eps) * residual[(t * n + s) * hidden + i];
        y += part;
        size += std::fabs(part);
      }
      const double got = input[t * hidden + i];
      if (std::fabs(got - y) > 0.004 * std::fabs(y) + 1e-4 * size) {
        return is_close("layer_input", t, i, got, y, 0);
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace flashinfer

int main(int, char** argv) {
  flashinfer::Random random;
  for (int i = 0; i < std::atoi(argv[1]); ++i) {
    if (!flashinfer::check_post(random) || !flashinfer::check_pre<false>(random) ||
        !flashinfer::check_pre<true>(random)) {
      return 1;
    }
  }
  return 0;
}
