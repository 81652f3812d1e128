// Random rows through the norms with gates, emulated on the CPU, against loops in double precision.
//
//   row_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/norm/gated_residual.cuh>
#include <flashinfer/norm/modulated_layernorm.cuh>
#include <flashinfer/norm/sigmoid_gate.cuh>

#include <random>
#include <vector>

namespace flashinfer {
namespace {

using BF16 = dtype::bfloat16;

struct Random {
  std::mt19937 engine{11};
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  float normal(float mean = 0.f) { return std::normal_distribution<float>(mean, 1.f)(engine); }
  bool one_in(int n) { return integer(1, n) == 1; }
};

// Rows of a wider matrix; what lies between them keeps its value.
template <typename T>
struct Rows {
  int rows, columns, stride;
  std::vector<uint4> storage;

  Rows(Random& random, int rows, int columns, float mean = 0.f)
      : rows(rows),
        columns(columns),
        stride(columns + 8 * random.integer(0, 2)),
        storage(size_t(rows) * stride * sizeof(T) / 16 + 1) {
    for (int i = 0; i < rows * stride; ++i) data()[i] = from_float<T>(random.normal(mean));
  }
  T* data() { return reinterpret_cast<T*>(storage.data()); }
  double at(int row, int col) { return to_float(data()[size_t(row) * stride + col]); }
};

bool is_close(const char* what, int row, int col, double got, double expected, double relative) {
  if (std::fabs(got - expected) <= relative * (std::fabs(expected) + 1)) return true;
  std::printf("%s [%d, %d]: got %g, expected %g\n", what, row, col, got, expected);
  return false;
}

template <bool kNext>
bool check_residual(Random& random) {
  const int rows = random.integer(1, 9),
            hidden = 8 * random.integer(1, random.one_in(3) ? 300 : 40);
  Rows<BF16> branch(random, rows, hidden), normed(random, rows, hidden);
  Rows<float> residual(random, rows, hidden), out(random, rows, hidden);
  Rows<float> alpha(random, 1, hidden, 1.f), beta(random, 1, hidden);
  Rows<BF16> post(random, 1, hidden), next(random, 1, hidden);
  GatedResidualParams params = {};
  params.branch = branch.data();
  params.residual = residual.data();
  params.post_weight = random.one_in(2) ? post.data() : nullptr;
  params.alpha = random.one_in(2) ? alpha.data() : nullptr;
  params.beta = beta.data();
  params.next_weight = next.data();
  params.out = random.one_in(2) ? residual.data() : out.data();
  params.normed_out = normed.data();
  params.branch_stride = branch.stride;
  params.residual_stride = residual.stride;
  params.out_stride = params.out == residual.data() ? residual.stride : out.stride;
  params.normed_stride = normed.stride;
  params.num_rows = rows;
  params.hidden_size = hidden;
  params.alpha_value = random.normal();
  params.post_center = random.normal();
  params.next_center = random.normal();
  params.post_eps = params.next_eps = 1e-3f;
  Rows<float> before = residual;
  DeviceInfo device;
  device.num_sms = 1;
  // Few CTAs, so that each has several rows: as many as an SM holds.
  launch_gated_residual<BF16, kNext>(params, device, false, nullptr);
  for (int row = 0; row < rows; ++row) {
    std::vector<double> b(hidden), s(hidden);
    double squares = 0, total = 0;
    for (int i = 0; i < hidden; ++i) {
      b[i] = branch.at(row, i) * (params.post_weight ? post.at(0, i) + params.post_center : 1.);
      squares += b[i] * b[i];
    }
    const double inv_rms = 1 / std::sqrt(squares / hidden + params.post_eps);
    for (int i = 0; i < hidden; ++i) {
      const double gate = params.alpha ? alpha.at(0, i) : params.alpha_value;
      s[i] = gate * before.at(row, i) + beta.at(0, i) * b[i] * inv_rms;
      total += s[i] * s[i];
      const double got = params.out[size_t(row) * params.out_stride + i];
      if (!is_close("stream", row, i, got, s[i], 1e-5)) return false;
    }
    if (!kNext) continue;
    const double next_rms = 1 / std::sqrt(total / hidden + params.next_eps);
    for (int i = 0; i < hidden; ++i) {
      const double y = s[i] * next_rms * (next.at(0, i) + params.next_center);
      if (!is_close("next norm", row, i, normed.at(row, i), y, 0.005)) return false;
    }
  }
  return true;
}

bool check_gate(Random& random) {
  const int rows = random.integer(1, 40), heads = random.integer(1, 7);
  const int head_dim = 8 << random.integer(0, 5);
  Rows<BF16> input(random, rows, heads * head_dim), gate(random, rows, heads * head_dim);
  Rows<BF16> before = input;
  SigmoidGateParams params = {};
  params.input = input.data();
  params.gate = gate.data();
  params.input_stride = input.stride;
  params.gate_stride = gate.stride;
  params.num_rows = rows;
  params.row_vecs = heads * head_dim / 8;
  params.lanes_per_head = head_dim / 8;
  params.eps = 1e-3f;
  launch_sigmoid_gate<BF16>(params, false, nullptr);
  for (int row = 0; row < rows; ++row) {
    for (int first = 0; first < heads * head_dim; first += head_dim) {
      double squares = 0;
      for (int i = first; i < first + head_dim; ++i)
        squares += before.at(row, i) * before.at(row, i);
      const double inv_rms = 1 / std::sqrt(squares / head_dim + params.eps);
      for (int i = first; i < first + head_dim; ++i) {
        const double y = before.at(row, i) * inv_rms / (1 + std::exp(-gate.at(row, i)));
        if (!is_close("gated head", row, i, input.at(row, i), y, 0.005)) return false;
      }
    }
    for (int i = heads * head_dim; i < input.stride; ++i) {
      if (input.at(row, i) != before.at(row, i)) return is_close("padding", row, i, 1, 0, 0);
    }
  }
  return true;
}

template <bool kGate, bool kAffine>
bool check_modulated(Random& random) {
  const int batch = random.integer(1, 3), rows = random.integer(1, 6);
  const int hidden = 8 * random.integer(1, random.one_in(3) ? 200 : 40), all = batch * rows;
  Rows<BF16> input(random, all, hidden, 2.f), residual(random, all, hidden);
  Rows<BF16> gate(random, all, hidden), scale(random, all, hidden), shift(random, all, hidden);
  Rows<float> gate_bias(random, 1, hidden), scale_bias(random, 1, hidden);
  Rows<float> shift_bias(random, 1, hidden);
  Rows<BF16> sum(random, all, hidden), normed(random, all, hidden);
  const auto rows_of = [&](Rows<BF16>& tensor, bool is_one_row = false) {
    return BatchedRows{tensor.data(), int64_t{tensor.stride} * rows,
                       is_one_row ? 0 : int64_t{tensor.stride}};
  };
  // A scale for each image, which all its rows share.
  const bool shares = random.one_in(2);
  const float input_scale = random.normal();
  ModulatedLayernormParams params = {};
  params.input = rows_of(input);
  if (kGate || random.one_in(2)) params.residual = rows_of(residual);
  params.gate = rows_of(gate);
  params.scale = rows_of(scale, shares);
  params.shift = rows_of(shift);
  params.gate_bias = random.one_in(2) ? gate_bias.data() : nullptr;
  params.scale_bias = kAffine || random.one_in(2) ? scale_bias.data() : nullptr;
  params.shift_bias = kAffine || random.one_in(2) ? shift_bias.data() : nullptr;
  params.input_scale = random.one_in(2) ? &input_scale : nullptr;
  params.sum_out = rows_of(sum);
  params.normed_out = rows_of(normed);
  params.batch_size = batch;
  params.num_rows = rows;
  params.hidden_size = hidden;
  params.eps = 1e-3f;
  DeviceInfo device;
  device.num_sms = 1;
  launch_modulated_layernorm<BF16, kGate, kAffine>(params, device, nullptr);
  for (int row = 0; row < all; ++row) {
    const int scale_row = shares ? row / rows * rows : row;
    std::vector<double> h(hidden);
    double mean = 0, variance = 0;
    for (int i = 0; i < hidden; ++i) {
      h[i] = input.at(row, i) * (params.input_scale ? input_scale : 1.f);
      if (kGate) h[i] *= gate.at(row, i) + (params.gate_bias ? gate_bias.at(0, i) : 0.);
      if (params.residual.data) h[i] += residual.at(row, i);
      mean += h[i] / hidden;
    }
    for (double x : h) variance += (x - mean) * (x - mean) / hidden;
    for (int i = 0; i < hidden; ++i) {
      const double gain = (kAffine ? 0. : 1. + scale.at(scale_row, i)) +
                          (params.scale_bias ? scale_bias.at(0, i) : 0.);
      const double offset =
          (kAffine ? 0. : shift.at(row, i)) + (params.shift_bias ? shift_bias.at(0, i) : 0.);
      const double y = (h[i] - mean) / std::sqrt(variance + params.eps) * gain + offset;
      if (!is_close("sum", row, i, sum.at(row, i), h[i], 0.005)) return false;
      if (!is_close("modulated norm", row, i, normed.at(row, i), y, 0.005)) return false;
    }
  }
  return true;
}

bool check(Random& random) {
  return check_residual<false>(random) && check_residual<true>(random) && check_gate(random) &&
         check_modulated<true, true>(random) && check_modulated<true, false>(random) &&
         check_modulated<false, false>(random);
}

}  // namespace
}  // namespace flashinfer

int main(int, char** argv) {
  flashinfer::Random random;
  for (int i = 0; i < std::atoi(argv[1]); ++i) {
    if (!flashinfer::check(random)) return 1;
  }
  return 0;
}
