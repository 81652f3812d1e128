// Random sequences through the chunked kernels of Mamba-2, emulated on the CPU, against the
// recurrence in double precision.
//
//   ssd_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include "ssd.cu"

#include <random>
#include <vector>

namespace flashinfer {
namespace {

using T = dtype::FLASHINFER_CFG_DTYPE;
using State = dtype::FLASHINFER_CFG_STATE_DTYPE;
using Dt = dtype::FLASHINFER_CFG_DT_DTYPE;
constexpr int kDim = FLASHINFER_CFG_DSTATE;

struct Random {
  std::mt19937 engine{5};
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  float normal() { return std::normal_distribution<float>()(engine); }
  bool one_in(int n) { return integer(1, n) == 1; }

  template <typename U>
  std::vector<U> normals(size_t count) {
    std::vector<U> values(count);
    for (U& value : values) value = from_float<U>(normal());
    return values;
  }
};

struct Problem {
  int heads, groups, value_dim;
  std::vector<int64_t> cu_seqlens{0};
  std::vector<T> x, B, C, z, out;
  std::vector<Dt> dt;
  std::vector<float> A, skip, bias;
  std::vector<State> state, last;

  explicit Problem(Random& random) {
    groups = random.integer(1, 2);
    heads = groups * random.integer(1, 2);
    value_dim = 64 * random.integer(1, 2);
    for (int i = random.integer(1, 3); i > 0; --i) {
      cu_seqlens.push_back(cu_seqlens.back() + (random.one_in(5) ? 0 : random.integer(1, 200)));
    }
    const size_t rows = std::max<size_t>(tokens(), 1);
    x = random.normals<T>(rows * heads * value_dim);
    B = random.normals<T>(rows * groups * kDim);
    C = random.normals<T>(rows * groups * kDim);
    if (random.one_in(2)) z = random.normals<T>(x.size());
    out.assign(x.size(), from_float<T>(NAN));
    dt = random.normals<Dt>(rows * heads);
    A = random.normals<float>(heads);
    for (float& value : A) value = -std::fabs(value) - 0.05f;
    if (random.one_in(2)) skip = random.normals<float>(heads);
    if (random.one_in(2)) bias = random.normals<float>(heads);
    const size_t states = size_t(batch()) * heads * value_dim * kDim;
    if (random.one_in(2)) state = random.normals<State>(states);
    last.assign(states, from_float<State>(NAN));
  }
  int batch() const { return static_cast<int>(cu_seqlens.size()) - 1; }
  int tokens() const { return static_cast<int>(cu_seqlens.back()); }
};

template <typename U>
TokenHeads rows_of(std::vector<U>& data, int heads, int dim) {
  return {data.empty() ? nullptr : data.data(), 0, int64_t{heads} * dim, dim};
}

template <typename U>
U* pointer(std::vector<U>& data) {
  return data.empty() ? nullptr : data.data();
}

void launch(Random& random, Problem& p) {
  const int slots = p.tokens() / kChunkSize + p.batch();
  std::vector<T> scores(size_t(slots) * p.heads * kChunkSize * kChunkSize, from_float<T>(NAN));
  std::vector<float> factors(size_t(slots) * p.heads * 4 * kChunkSize, NAN);
  ChunkDeltaRuleParams all = {};
  DeltaRuleParams& params = all.recurrence;
  params.q = rows_of(p.C, p.groups, kDim);
  params.k = rows_of(p.B, p.groups, kDim);
  params.v = rows_of(p.x, p.heads, p.value_dim);
  params.out = rows_of(p.out, p.heads, p.value_dim);
  params.gate = rows_of(p.dt, p.heads, 1);
  params.a_log = p.A.data();
  params.dt_bias = pointer(p.bias);
  params.scale = 1.f;
  const int64_t matrix = int64_t{p.value_dim} * kDim;
  params.state = {pointer(p.state), p.heads * matrix, matrix, p.batch()};
  params.state_out = {p.last.data(), p.heads * matrix, matrix, p.batch()};
  params.snapshot_every = kChunkSize;
  params.cu_seqlens = p.cu_seqlens.data();
  params.cu_seqlens_is_int64 = true;
  params.batch_size = p.batch();
  params.num_tokens = p.tokens();
  params.state_heads = p.heads;
  params.q_group = params.k_group = FastDivisor(p.heads / p.groups);
  params.v_group = FastDivisor(1);
  params.head_dim_v = p.value_dim;
  all.ssd = {pointer(p.skip), rows_of(p.z, p.heads, p.value_dim), true, 0.02f, 1.5f};
  all.workspace = {nullptr, scores.data(), factors.data()};
  all.num_slots = slots;
  const int schedule = p.value_dim % 128 == 0 && random.one_in(2) ? 8 : 4;
  if (ssd(all, 132, schedule, false, nullptr) != cudaSuccess) emulation::fail("no launch");
}

bool near(const char* what, int at, double got, double expected) {
  if (std::fabs(got - expected) <= 0.06 * (1. + std::fabs(expected))) return true;
  std::printf("%s at %d: got %g, expected %g\n", what, at, got, expected);
  return false;
}

// One channel of one head of one sequence.
bool check_channel(const Problem& p, int sequence, int head, int channel) {
  const int group = head * p.groups / p.heads;
  const size_t at = ((size_t(sequence) * p.heads + head) * p.value_dim + channel) * kDim;
  double state[kDim];
  for (int i = 0; i < kDim; ++i) state[i] = p.state.empty() ? 0. : to_float(p.state[at + i]);
  for (int token = p.cu_seqlens[sequence]; token < p.cu_seqlens[sequence + 1]; ++token) {
    double dt = to_float(p.dt[size_t(token) * p.heads + head]);
    dt = std::log1p(std::exp(dt + (p.bias.empty() ? 0. : p.bias[head])));
    dt = std::fmin(std::fmax(dt, 0.02), 1.5);
    const size_t row = (size_t(token) * p.heads + head) * p.value_dim + channel;
    const T* B = &p.B[(size_t(token) * p.groups + group) * kDim];
    const T* C = &p.C[(size_t(token) * p.groups + group) * kDim];
    const double x = to_float(p.x[row]);
    double out = p.skip.empty() ? 0. : p.skip[head] * x;
    for (int i = 0; i < kDim; ++i) {
      state[i] = std::exp(p.A[head] * dt) * state[i] + dt * x * to_float(B[i]);
      out += state[i] * to_float(C[i]);
    }
    if (!p.z.empty()) out *= to_float(p.z[row]) / (1. + std::exp(-to_float(p.z[row])));
    // Sums of as many products as the state has elements.
    if (!near("output", token, to_float(p.out[row]) / 12., out / 12.)) return false;
  }
  for (int i = 0; i < kDim; ++i) {
    if (!near("state", i, to_float(p.last[at + i]), state[i])) return false;
  }
  return true;
}

bool check(Random& random) {
  Problem problem(random);
  launch(random, problem);
  for (int sequence = 0; sequence < problem.batch(); ++sequence) {
    for (int head = 0; head < problem.heads; ++head) {
      for (int channel = 0; channel < problem.value_dim; ++channel) {
        if (!check_channel(problem, sequence, head, channel)) return false;
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
    if (!flashinfer::check(random)) {
      std::printf("in case %d\n", i);
      return 1;
    }
  }
  return 0;
}
