// Random sequences through a kernel of the gated delta rule, emulated on the CPU, against the
// recurrence in double precision. EMULATION_CHUNKS: the one in chunks, EMULATION_KDA: that with a
// decay per channel; else the one token by token.
//
//   delta_rule_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#ifdef EMULATION_CHUNKS
#include "chunk_delta_rule.cu"
#elif defined(EMULATION_KDA)
#include "chunk_kda.cu"
#else
#include "delta_rule.cu"
#endif

#include <random>
#include <vector>

namespace flashinfer {
namespace {

using T = dtype::FLASHINFER_CFG_DTYPE;
using State = dtype::FLASHINFER_CFG_STATE_DTYPE;
constexpr int kDim = FLASHINFER_CFG_HEAD_DIM_K;
#ifdef EMULATION_CHUNKS
constexpr bool kChunks = true, kByChannel = false, kKeyMajor = false;
#elif defined(EMULATION_KDA)
constexpr bool kChunks = true, kByChannel = true, kKeyMajor = false;
#else
constexpr bool kChunks = false, kByChannel = FLASHINFER_CFG_CHANNEL_GATE;
constexpr bool kKeyMajor = FLASHINFER_CFG_KEY_MAJOR;
#endif
constexpr int kGates = kByChannel ? kDim : 1;
constexpr bool kAllGates = kByChannel || !kChunks;  // else decays and their logarithms

struct Random {
  std::mt19937 engine{3};
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  float normal(float width) { return std::normal_distribution<float>(0.f, width)(engine); }
  float uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(engine);
  }
  bool one_in(int n) { return integer(1, n) == 1; }
};

double sigmoid_of(double x) { return 1. / (1. + std::exp(-x)); }

template <typename U>
std::vector<U> normals(Random& random, size_t count, float width) {
  std::vector<U> values(count);
  for (U& value : values) value = from_float<U>(random.normal(width));
  return values;
}

struct Problem {
  int value_dim, q_heads, v_heads, heads;
  std::vector<int64_t> cu_seqlens{0};
  bool normalize, beta_is_logit, has_state, has_beta, one_step, is_steep, has_padding;
  GateForm form;
  float scale, lower_bound;

  explicit Problem(Random& random) {
    value_dim = kChunks ? 64 * random.integer(1, 2) : 8 * random.integer(1, 16);
    q_heads = random.integer(1, 2);
    v_heads = q_heads * random.integer(1, 2);
    heads = v_heads;
    const int longest = kChunks ? 200 : 20;
    one_step = !kChunks && !kKeyMajor && random.one_in(2);
    for (int i = random.integer(1, 3); i > 0; --i) {
      const int length = one_step ? 1 : random.one_in(5) ? 0 : random.integer(1, longest);
      cu_seqlens.push_back(cu_seqlens.back() + length);
    }
    normalize = !random.one_in(4);
    beta_is_logit = kAllGates && random.one_in(2);
    has_beta = !random.one_in(5);
    has_state = kKeyMajor || !random.one_in(3);
    form = static_cast<GateForm>(random.integer(0, kAllGates ? 3 : 1));
    if (one_step && random.one_in(2)) {  // what the kernel of one step is for
      beta_is_logit = has_beta = has_state = true;
      form = GateForm::kSoftplus;
    }
    scale = random.one_in(2) ? 1.f : 0.3f;
    is_steep = kByChannel && random.one_in(3);
    lower_bound = is_steep ? -60.f : -3.f;
    has_padding = has_state && batch() > 1 && random.one_in(3);
  }
  int batch() const { return static_cast<int>(cu_seqlens.size()) - 1; }
  int tokens() const { return static_cast<int>(cu_seqlens.back()); }
};

// One step: sequences are batches of one token, else they are packed.
TokenHeads rows_of(const Problem& p, void* data, int heads, int dim) {
  return {data, p.one_step ? int64_t{heads} * dim : 0, int64_t{heads} * dim, dim};
}

struct Data {
  std::vector<T> q, k, v, out;
  std::vector<float> gate, beta, a_log, bias;
  std::vector<State> state, last;
  std::vector<int32_t> slots;
  std::vector<int64_t> bounds;  // as the kernel is told

  Data(Random& random, const Problem& p) {
    const size_t rows = std::max(p.tokens(), 1);
    q = normals<T>(random, rows * p.q_heads * kDim, 1.f);
    k = normals<T>(random, rows * p.q_heads * kDim, p.normalize ? 1.f : 0.08f);
    v = normals<T>(random, rows * p.v_heads * p.value_dim, 1.f);
    out.assign(rows * p.heads * p.value_dim, from_float<T>(NAN));
    gate.resize(rows * p.heads * kGates);
    for (float& value : gate) {
      value = p.form == GateForm::kLinear ? random.uniform(p.is_steep ? 0.f : 0.3f, 1.f)
              : p.form == GateForm::kLog  ? random.uniform(p.is_steep ? -90.f : -1.f, 0.f)
                                          : random.normal(p.is_steep ? 9.f : 1.f);
    }
    beta.resize(rows * p.heads);
    for (float& value : beta) value = p.beta_is_logit ? random.normal(1.f) : random.uniform(0, 1);
    a_log = normals<dtype::float32>(random, p.heads, 0.5f);
    bias = normals<dtype::float32>(random, size_t(p.heads) * kGates, 0.5f);
    const size_t pool = size_t(p.batch() + 1) * p.heads * p.value_dim * kDim;
    state = normals<State>(random, pool, 0.5f);
    last.assign(pool, from_float<State>(NAN));
    for (int i = 0; i <= p.batch(); ++i) slots.push_back(i);
    std::shuffle(slots.begin(), slots.end(), random.engine);
    constexpr int kNone[] = {-1, -5, 4, 1 << 28};  // of at most four slots
    if (p.has_padding) slots[0] = kNone[random.integer(0, 3)];
    bounds = p.cu_seqlens;
    if (!p.one_step && random.one_in(3)) {  // more tokens than there are
      bounds.front() = -7;
      bounds.back() += 100000;
    }
  }
};

DeltaRuleParams params_of(const Problem& p, Data& d) {
  DeltaRuleParams params = {};
  params.q = rows_of(p, d.q.data(), p.q_heads, kDim);
  params.k = rows_of(p, d.k.data(), p.q_heads, kDim);
  params.v = rows_of(p, d.v.data(), p.v_heads, p.value_dim);
  params.out = rows_of(p, d.out.data(), p.heads, p.value_dim);
  params.gate = rows_of(p, d.gate.data(), p.heads, kGates);
  if (p.has_beta) params.beta = rows_of(p, d.beta.data(), p.heads, 1);
  params.a_log = d.a_log.data();
  params.dt_bias = d.bias.data();
  params.scale = p.scale;
  params.lower_bound = p.lower_bound;
  params.gate_form = p.form;
  params.beta_is_logit = p.beta_is_logit;
  params.normalize_qk = p.normalize;
  const int64_t matrix = int64_t{p.value_dim} * kDim;
  params.state = {nullptr, 0, 0, INT64_MAX};
  if (p.has_state) params.state = {d.state.data(), p.heads * matrix, matrix, p.batch() + 1};
  params.state_out = {d.last.data(), p.heads * matrix, matrix, p.batch() + 1};
  params.read_slot = params.write_slot = {d.slots.data(), 1, 0, false, 1};
  if (!p.one_step) params.cu_seqlens = d.bounds.data();
  params.cu_seqlens_is_int64 = true;
  params.batch_size = p.batch();
  params.num_tokens = p.one_step ? 1 : p.tokens();
  params.state_heads = p.heads;
  params.q_group = params.k_group = FastDivisor(p.heads / p.q_heads);
  params.v_group = FastDivisor(p.heads / p.v_heads);
  params.head_dim_v = p.value_dim;
  return params;
}

void launch(Random& random, const Problem& p, const DeltaRuleParams& recurrence) {
#if defined(EMULATION_CHUNKS) || defined(EMULATION_KDA)
  const int slots = p.tokens() / kChunkSize + p.batch();
  const size_t squares = size_t(slots) * p.heads * kChunkSize * kChunkSize;
  std::vector<T> solve(squares, from_float<T>(NAN)), scores(squares, from_float<T>(NAN));
  const int num_factors = kByChannel ? kDim : 4 * kChunkSize;
  std::vector<float> factors(size_t(slots) * p.heads * num_factors, NAN);
  const size_t operand = kByChannel ? 3 * kChunkSize * kDim : 0;
  std::vector<T> operands(size_t(slots) * p.heads * operand, from_float<T>(NAN));
  ChunkDeltaRuleParams params = {};
  params.recurrence = recurrence;
  params.workspace = {solve.data(), scores.data(), factors.data(), operands.data()};
  params.num_slots = slots;
  std::vector<uint32_t> progress(size_t(slots / kSlotsPerCounter + 1) * p.heads);
  if (random.one_in(2)) params.progress = progress.data();
  const int schedule = p.value_dim % 128 == 0 && random.one_in(2) ? 8 : 4;
#ifdef EMULATION_KDA
  const auto launch_chunks = chunk_kda;
#else
  const auto launch_chunks = chunk_delta_rule;
#endif
  const cudaError_t status = launch_chunks(params, random.integer(1, 3), schedule, false, nullptr);
#else
  constexpr int kSchedules[] = {0, 102, 104, 204};
  const int schedule = kSchedules[random.integer(0, 3)];
  const cudaError_t status = delta_rule(recurrence, 132, schedule, false, nullptr);
#endif
  if (status != cudaSuccess) emulation::fail("no launch");
}

double decay_of(const Problem& p, const Data& d, int token, int head, int channel) {
  const int at = kByChannel ? channel : 0;
  const double gate = d.gate[(size_t(token) * p.heads + head) * kGates + at];
  const double input = gate + d.bias[head * kGates + at], rate = std::exp(double{d.a_log[head]});
  if (p.form == GateForm::kLinear) return gate;
  if (p.form == GateForm::kLog) return std::exp(gate);
  if (p.form == GateForm::kSoftplus) return std::exp(-rate * std::log1p(std::exp(input)));
  return std::exp(p.lower_bound * sigmoid_of(rate * input));
}

bool near(const char* what, int token, double got, double expected, double tolerance) {
  if (std::fabs(got - expected) <= tolerance * (1. + std::fabs(expected))) return true;
  std::printf("%s at %d: got %g, expected %g\n", what, token, got, expected);
  return false;
}

// A sequence that is padding has outputs of zero.
bool check_padding(const Problem& p, const Data& d, int sequence) {
  const size_t row = size_t(p.heads) * p.value_dim;
  for (size_t i = p.cu_seqlens[sequence] * row; i < p.cu_seqlens[sequence + 1] * row; ++i) {
    if (to_float(d.out[i]) != 0.f) return near("padding", i / row, to_float(d.out[i]), 0., 0.);
  }
  return true;
}

// One head of one sequence, a row of the state for each value channel.
bool check_head(const Problem& p, const Data& d, int sequence, int head) {
  const int group = p.heads / p.q_heads, value_group = p.heads / p.v_heads;
  const size_t matrix = size_t(p.value_dim) * kDim;
  const size_t at = (size_t(d.slots[sequence]) * p.heads + head) * matrix;
  std::vector<double> state(matrix, 0.);
  // Where the pools have element i of the rows of value channels.
  const auto stored = [&](size_t i) {
    return at + (kKeyMajor ? i % kDim * p.value_dim + i / kDim : i);
  };
  for (size_t i = 0; p.has_state && i < matrix; ++i) state[i] = to_float(d.state[stored(i)]);
  // Chunks multiply 16-bit operands; token by token everything is float32.
  const double tolerance = kChunks ? 0.04 : 0.01;
  for (int token = p.cu_seqlens[sequence]; token < p.cu_seqlens[sequence + 1]; ++token) {
    const T* q = &d.q[(size_t(token) * p.q_heads + head / group) * kDim];
    const T* k = &d.k[(size_t(token) * p.q_heads + head / group) * kDim];
    const T* v = &d.v[(size_t(token) * p.v_heads + head / value_group) * p.value_dim];
    double q_norm = 0., k_norm = 0.;
    for (int i = 0; i < kDim; ++i) {
      q_norm += double{to_float(q[i])} * to_float(q[i]);
      k_norm += double{to_float(k[i])} * to_float(k[i]);
    }
    const double q_factor = p.scale * (p.normalize ? 1. / std::sqrt(q_norm + 1e-6) : 1.);
    const double k_factor = p.normalize ? 1. / std::sqrt(k_norm + 1e-6) : 1.;
    double beta = p.has_beta ? d.beta[size_t(token) * p.heads + head] : 1.;
    if (p.has_beta && p.beta_is_logit) beta = sigmoid_of(beta);
    for (int row = 0; row < p.value_dim; ++row) {
      double* const s = &state[size_t(row) * kDim];
      double seen = 0., out = 0.;
      for (int i = 0; i < kDim; ++i) {
        s[i] *= decay_of(p, d, token, head, i);
        seen += s[i] * k_factor * to_float(k[i]);
      }
      const double update = beta * (to_float(v[row]) - seen);
      for (int i = 0; i < kDim; ++i) {
        s[i] += update * k_factor * to_float(k[i]);
        out += s[i] * q_factor * to_float(q[i]);
      }
      const T got = d.out[(size_t(token) * p.heads + head) * p.value_dim + row];
      if (!near("output", token, to_float(got), out, tolerance)) return false;
    }
  }
  for (size_t i = 0; i < matrix; ++i) {
    if (!near("state", static_cast<int>(i), to_float(d.last[stored(i)]), state[i], tolerance))
      return false;
  }
  return true;
}

bool check(Random& random) {
  const Problem problem(random);
  Data data(random, problem);
  launch(random, problem, params_of(problem, data));
  for (int sequence = 0; sequence < problem.batch(); ++sequence) {
    if (data.slots[sequence] < 0 || data.slots[sequence] > problem.batch()) {
      if (!check_padding(problem, data, sequence)) return false;
      continue;
    }
    for (int head = 0; head < problem.heads; ++head) {
      if (!check_head(problem, data, sequence, head)) return false;
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
