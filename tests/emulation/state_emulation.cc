// Random sequences through the kernels of Mamba's states, emulated on the CPU, against the
// recurrence in double precision: token by token, with rings of inputs that are replayed, and
// states at a token of such a ring.
//
//   state_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include "checkpointing_ssu.cu"
#include "replayssm_materialize.cu"
#include "selective_state.cu"

#include <random>
#include <vector>

namespace flashinfer {
namespace {

using T = dtype::FLASHINFER_CFG_DTYPE;
using State = dtype::FLASHINFER_CFG_STATE_DTYPE;
constexpr int kDim = FLASHINFER_CFG_DSTATE;
constexpr bool kTied = FLASHINFER_CFG_TIED;
constexpr bool kScaled = kScaledMax<State> > 0.f;
constexpr double kStateError = kScaled ? 0.03 : sizeof(State) == 2 ? 0.006 : 1e-5;

struct Random {
  std::mt19937 engine{11};
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  float normal() { return std::normal_distribution<float>()(engine); }
  bool one_in(int n) { return integer(1, n) == 1; }
};

template <typename U>
std::vector<U> normals(Random& random, size_t count) {
  std::vector<U> values(count);
  for (U& value : values) value = from_float<U>(random.normal());
  return values;
}

// Sizes, weights and the pool, which stays for several steps.
struct Layer {
  int groups, heads, dim, slots;
  std::vector<float> A, D, bias, scale;
  std::vector<State> state;

  explicit Layer(Random& random) {
    groups = random.integer(1, 2);
    heads = groups * random.integer(1, 3);
    dim = random.one_in(2) ? 64 : random.integer(1, 70);
    slots = 5;
    A = normals<float>(random, size_t(heads) * dim * kDim);
    for (float& value : A) value = -std::fabs(value) - 0.02f;
    D = normals<float>(random, size_t(heads) * dim);
    bias = normals<float>(random, heads * dim);
    const size_t count = size_t(slots) * heads * dim * kDim;
    if constexpr (kScaled) {
      state.resize(count);
      auto* const codes = reinterpret_cast<uint8_t*>(state.data());
      for (size_t i = 0; i < count; ++i) codes[i] = random.integer(0, 255);
      scale.resize(count / kDim);
      for (float& value : scale) value = 0.01f + 0.001f * random.integer(0, 9);
    } else {
      state = normals<State>(random, count);
    }
  }
  double rate(int head, int row, int column) const {
    return kTied ? A[head] : A[(size_t(head) * dim + row) * kDim + column];
  }
  double value(size_t i) const { return to_float(state[i]) * (kScaled ? scale[i / kDim] : 1.); }
  size_t matrix(int slot, int head) const { return (size_t(slot) * heads + head) * dim * kDim; }
  SelectiveStateParams params() {
    SelectiveStateParams p = {};
    p.A = A.data();
    p.A_head_stride = kTied ? 1 : dim * kDim;
    p.A_dim_stride = kTied ? 0 : kDim;
    p.A_state_stride = kTied ? 0 : 1;
    p.D = D.data();
    p.D_head_stride = dim;
    p.D_dim_stride = 1;
    p.dt_bias = bias.data();
    p.bias_head_stride = kTied ? 1 : dim;
    p.bias_dim_stride = kTied ? 0 : 1;
    p.dt_dim_stride = kTied ? 0 : 1;
    p.dt_softplus = true;
    p.A_rows_are_vectors = !kTied;
    p.state = {state.data(), int64_t{heads} * dim * kDim, int64_t{dim} * kDim, slots};
    if (kScaled) p.state_scale = {scale.data(), int64_t{heads} * dim, dim};
    p.pad_slot = -1;
    p.write_state = true;
    p.num_heads = heads;
    p.heads_per_group = FastDivisor(heads / groups);
    p.dim = dim;
    return p;
  }
};

// Tokens of one call, as rows of all sequences, and where each begins.
struct Tokens {
  std::vector<int32_t> bounds{0};
  std::vector<T> x, z, B, C, out;
  std::vector<float> dt;

  Tokens(Random& random, const Layer& layer, const std::vector<int>& lengths) {
    for (int length : lengths) bounds.push_back(bounds.back() + length);
    const size_t rows = std::max(bounds.back(), 1);
    x = normals<T>(random, rows * layer.heads * layer.dim);
    z = normals<T>(random, x.size());
    B = normals<T>(random, rows * layer.groups * kDim);
    C = normals<T>(random, B.size());
    dt = normals<float>(random, rows * layer.heads * (kTied ? 1 : layer.dim));
    out.assign(x.size(), from_float<T>(NAN));
  }
  void fill(SelectiveStateParams& p, int groups) {
    const auto rows = [](void* data, int heads, int dim) {
      return TokenHeads{data, 0, int64_t{heads} * dim, dim};
    };
    p.x = rows(x.data(), p.num_heads, p.dim);
    if (!z.empty()) p.z = rows(z.data(), p.num_heads, p.dim);
    p.out = rows(out.data(), p.num_heads, p.dim);
    p.B = rows(B.data(), groups, kDim);
    p.C = rows(C.data(), groups, kDim);
    p.dt = rows(dt.data(), p.num_heads, kTied ? 1 : p.dim);
    p.cu_seqlens = bounds.data();
    p.batch_size = static_cast<int>(bounds.size()) - 1;
    p.num_tokens = bounds.back();
  }
};

bool near(const char* what, size_t at, double got, double expected, double tolerance) {
  if (std::fabs(got - expected) <= tolerance) return true;
  std::printf("%s at %zu: got %g, expected %g\n", what, at, got, expected);
  return false;
}

// Walks one token in double precision; checks its output if `checked`.
bool walk(const Layer& layer, const Tokens& tokens, int token, int head, std::vector<double>& state,
          bool checked) {
  const int group = head / (layer.heads / layer.groups);
  for (int row = 0; row < layer.dim; ++row) {
    const size_t at = (size_t(token) * layer.heads + head) * layer.dim + row;
    const double raw = kTied ? tokens.dt[size_t(token) * layer.heads + head] + layer.bias[head]
                             : tokens.dt[at] + layer.bias[head * layer.dim + row];
    const double dt = std::log1p(std::exp(raw)), x = to_float(tokens.x[at]);
    double sum = layer.D[head * layer.dim + row] * x, size = std::fabs(sum) + 1.;
    for (int i = 0; i < kDim; ++i) {
      double& s = state[size_t(row) * kDim + i];
      const size_t column = (size_t(token) * layer.groups + group) * kDim + i;
      s = s * std::exp(layer.rate(head, row, i) * dt) + dt * x * to_float(tokens.B[column]);
      sum += s * to_float(tokens.C[column]);
      size += std::fabs(s * to_float(tokens.C[column]));
    }
    const double z = tokens.z.empty() ? 0. : to_float(tokens.z[at]);
    const double gate = tokens.z.empty() ? 1. : z / (1. + std::exp(-z));
    if (checked && !near("output", at, to_float(tokens.out[at]), sum * gate,
                         (4e-3 * std::fabs(sum) + 1e-5 * size) * std::fabs(gate) + 1e-6)) {
      return false;
    }
  }
  return true;
}

std::vector<double> matrix_of(const Layer& layer, int slot, int head) {
  std::vector<double> values(size_t(layer.dim) * kDim);
  for (size_t i = 0; i < values.size(); ++i) values[i] = layer.value(layer.matrix(slot, head) + i);
  return values;
}

bool same_matrix(const Layer& layer, int slot, int head, const std::vector<double>& expected) {
  for (size_t row = 0; row < expected.size() / kDim; ++row) {
    double largest = 0.;
    for (int i = 0; i < kDim; ++i) {
      largest = std::max(largest, std::fabs(expected[row * kDim + i]));
    }
    for (size_t i = row * kDim; i < (row + 1) * kDim; ++i) {
      const double got = layer.value(layer.matrix(slot, head) + i);
      if (!near("state", i, got, expected[i], kStateError * largest)) return false;
    }
  }
  return true;
}

// Leaves out an operand that a call may do without.
void leave_out_one(Random& random, Layer& layer, Tokens& tokens, SelectiveStateParams& params) {
  switch (random.integer(0, 3)) {
    case 0:
      layer.D.assign(layer.D.size(), 0.f);
      params.D = nullptr;
      return;
    case 1:
      layer.bias.assign(layer.bias.size(), 0.f);
      params.dt_bias = nullptr;
      return;
    case 2:
      tokens.z.clear();
      params.z = {};
      return;
  }
}

// States after tokens, of which a call keeps those that have a place: row 1 is for sequence 0, and
// the others' are past the end, before the beginning, and row 0. No other memory is touched.
struct Kept {
  static constexpr int kRows = 2;
  int steps;
  size_t matrices, guard;
  std::vector<State> states;
  std::vector<float> scales;
  std::vector<int32_t> rows{1, kRows, -1, 0};

  Kept(Random& random, const Layer& layer) : steps(random.integer(1, 9)) {
    matrices = size_t(layer.heads) * layer.dim;
    guard = size_t(10) * matrices;
    states.assign((2 * guard + kRows * steps * matrices) * kDim, from_float<State>(1.f));
    scales.assign(states.size() / kDim, 1.f);
  }
  void fill(SelectiveStateParams& p) {
    const int64_t matrix = int64_t{p.dim} * kDim;
    p.intermediate = {states.data() + guard * kDim, p.num_heads * matrix, matrix, kRows * steps};
    if (kScaled) p.intermediate_scale = {scales.data() + guard, p.num_heads * p.dim, p.dim};
    p.snapshot_slot = {rows.data(), 1, 0, false, 1};
    p.steps = steps;
  }
  bool has(int sequence, int t) const {
    return t < steps && rows[sequence] >= 0 && rows[sequence] < kRows;
  }
  bool is_state(const Layer& layer, int sequence, int t, int head,
                const std::vector<double>& expected) const {
    const size_t row = guard + (size_t(rows[sequence]) * steps + t) * matrices + head * layer.dim;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double code = to_float(states[row * kDim + i]);
      const double got = code * (kScaled ? scales[row + i / kDim] : 1.);
      if (!near("kept state", i, got, expected[i], kStateError * (20. + std::fabs(expected[i])))) {
        return false;
      }
    }
    return true;
  }
  bool is_whole() const {
    for (size_t i = 0; i < guard; ++i) {
      for (const size_t row : {i, scales.size() - 1 - i}) {
        if (!near("guard", row, to_float(states[row * kDim]), to_float(from_float<State>(1.f)), 0.))
          return false;
      }
    }
    return true;
  }
};

// One call token by token.
bool check_steps(Random& random) {
  Layer layer(random);
  const bool one = random.one_in(2);
  std::vector<int> lengths;
  for (int i = random.integer(1, 4); i > 0; --i) lengths.push_back(one ? 1 : random.integer(0, 9));
  Tokens tokens(random, layer, lengths);
  SelectiveStateParams params = layer.params();
  params.pad_slot = random.one_in(2) ? 2 : -1;
  const int none[] = {int(params.pad_slot), -7, 5, 1 << 30};  // padding: a pool of 5 has them not
  std::vector<int32_t> slots{3, 1, none[random.integer(0, 3)], 0};
  tokens.fill(params, layer.groups);
  std::vector<int32_t> bounds = tokens.bounds;
  if (random.one_in(3)) {  // more tokens than there are
    bounds.front() = -5;
    bounds.back() += 100000;
    params.cu_seqlens = bounds.data();
  }
  Kept kept(random, layer);
  const bool keeps = random.one_in(2);
  if (keeps) kept.fill(params);
  leave_out_one(random, layer, tokens, params);
  const Layer before = layer;
  if (one) {  // as [batch, 1, ...]
    params.cu_seqlens = nullptr;
    params.num_tokens = 1;
    for (TokenHeads* t : {&params.x, &params.z, &params.out, &params.B, &params.C, &params.dt}) {
      t->batch_stride = t->token_stride;
    }
  }
  if (random.one_in(4)) {
    slots = {0, 1, 2, 3};
    params.pad_slot = -1;  // no slot is told
  } else {
    params.read_slot = params.write_slot = {slots.data(), 1, 0, false, 1};
  }
  constexpr int kSchedules[] = {101, 104, 142, 1, 1};
  const int schedule = kSchedules[random.integer(0, one ? 4 : 1)];
  const int num_sms = random.one_in(2) ? 132 : 0;  // few rows for an SM, or not
  if (selective_state(params, num_sms, schedule, false, nullptr) != cudaSuccess) return false;
  for (int i = 0; i < params.batch_size; ++i) {
    for (int head = 0; head < layer.heads; ++head) {
      if (slots[i] < 0 || slots[i] >= layer.slots || slots[i] == params.pad_slot) {
        for (int row = 0; one && row < layer.dim; ++row) {
          const size_t at = (size_t(i) * layer.heads + head) * layer.dim + row;
          if (!near("output of padding", at, to_float(tokens.out[at]), 0., 0.)) return false;
        }
        continue;
      }
      std::vector<double> state = matrix_of(before, slots[i], head);
      for (int t = tokens.bounds[i]; t < tokens.bounds[i + 1]; ++t) {
        if (!walk(before, tokens, t, head, state, true)) return false;
        const int step = t - tokens.bounds[i];
        if (keeps && kept.has(i, step) && !kept.is_state(layer, i, step, head, state)) return false;
      }
      if (lengths[i] > 0 && !same_matrix(layer, slots[i], head, state)) return false;
    }
  }
  return kept.is_whole();
}

// The tokens that were accepted since the state of a slot was written: which call, which token.
struct History {
  std::vector<std::pair<int, int>> tokens;
};

// Several steps with rings; after each a part of its tokens is accepted. Then states from the
// rings.
bool check_rings(Random& random) {
  Layer layer(random);
  const int most = random.integer(1, 5), window = most + random.integer(0, 6);
  const int rows = window + most, batch = 3;
  const std::vector<int32_t> slots{2, 0, 4};
  std::vector<T> x(size_t(layer.slots) * layer.heads * rows * layer.dim, from_float<T>(NAN));
  std::vector<T> B(size_t(layer.slots) * layer.groups * rows * kDim, from_float<T>(NAN));
  std::vector<float> dt(size_t(layer.slots) * layer.heads * rows, NAN);
  std::vector<int32_t> start(layer.slots), replayed(layer.slots, 0);
  for (int32_t& value : start) value = random.integer(0, rows - 1);
  std::vector<History> histories(layer.slots);
  std::vector<Tokens> calls;
  CheckpointingStateParams params = {};
  params.rings = {x.data(),
                  B.data(),
                  dt.data(),
                  int64_t{layer.heads} * rows * layer.dim,
                  int64_t{layer.groups} * rows * kDim,
                  int64_t{layer.heads} * rows,
                  rows};
  params.ring_start = start.data();
  params.num_replayed = replayed.data();
  params.window = window;
  for (int call = 0; call < 5; ++call) {
    std::vector<int> lengths;
    for (int i = 0; i < batch; ++i) lengths.push_back(random.integer(0, most));
    calls.emplace_back(random, layer, lengths);
    Tokens& tokens = calls.back();
    const Layer before = layer;
    params.step = layer.params();
    tokens.fill(params.step, layer.groups);
    params.step.read_slot = {slots.data(), 1, 0, false, 1};
    if (checkpointing_ssu(params, false, nullptr) != cudaSuccess) return false;
    for (int i = 0; i < batch; ++i) {
      const int slot = slots[i];
      History& history = histories[slot];
      const bool written = replayed[slot] > 0 && replayed[slot] + lengths[i] > window;
      for (int head = 0; head < layer.heads; ++head) {
        std::vector<double> state = matrix_of(before, slot, head);
        for (const auto& [then, token] : history.tokens) {
          walk(before, calls[then], token, head, state, false);
        }
        if (!same_matrix(layer, slot, head, written ? state : matrix_of(before, slot, head))) {
          return false;
        }
        for (int t = tokens.bounds[i]; t < tokens.bounds[i + 1]; ++t) {
          if (!walk(before, tokens, t, head, state, true)) return false;
        }
      }
      if (written) {
        start[slot] = (start[slot] + replayed[slot]) % rows;
        replayed[slot] = 0;
        history.tokens.clear();
      }
      const int accepted = random.integer(0, lengths[i]);
      for (int t = 0; t < accepted; ++t) history.tokens.push_back({call, tokens.bounds[i] + t});
      replayed[slot] += accepted;
    }
  }
  // A ring that begins nowhere keeps to its slot.
  Tokens lost(random, layer, {most});
  const std::vector<int32_t> alone{3};
  const std::vector<float> dt_before = dt;
  start[3] = -most;
  params.step = layer.params();
  lost.fill(params.step, layer.groups);
  params.step.read_slot = {alone.data(), 1, 0, false, 1};
  if (checkpointing_ssu(params, false, nullptr) != cudaSuccess) return false;
  const size_t ring = params.rings.dt_slot_stride;
  for (size_t i = 0; i < dt.size(); ++i) {
    const bool same = std::memcmp(&dt[i], &dt_before[i], sizeof(float)) == 0;
    if (i / ring != 3 && !same) return near("another ring", i, dt[i], dt_before[i], -1.);
  }
  // Two layers that are the same one, whose states go to two slots.
  const auto address = [](void* data) { return reinterpret_cast<int64_t>(data); };
  const auto twice = [](int64_t value) { return std::vector<int64_t>(2, value); };
  MaterializeStateParams all = {};
  const auto states = twice(address(layer.state.data())), xs = twice(address(x.data()));
  const auto Bs = twice(address(B.data())), dts = twice(address(dt.data()));
  const auto rates = twice(address(layer.A.data())), scales = twice(address(layer.scale.data()));
  const auto state_stride = twice(int64_t{layer.heads} * layer.dim * kDim);
  const auto scale_stride = twice(int64_t{layer.heads} * layer.dim);
  const auto x_stride = twice(params.rings.x_slot_stride);
  const auto B_stride = twice(params.rings.B_slot_stride);
  const auto dt_stride = twice(params.rings.dt_slot_stride);
  const std::vector<int32_t> source{2, 0, 4, 2, -1, 4}, target{1, -1, 1, 3, 3, -1};
  const std::vector<int32_t> active{random.one_in(2) ? 0 : 2, 1, -1};
  const int chosen = active[0], slot = slots[chosen], used = random.integer(0, replayed[slot]);
  std::vector<int32_t> starts, counts(batch, used);
  for (int i = 0; i < batch; ++i) starts.push_back(start[slots[i]]);
  all.step = layer.params();
  all.step.batch_size = batch;
  all.step.num_tokens = 0;
  all.state = states.data(), all.state_slot_stride = state_stride.data();
  all.x = xs.data(), all.x_slot_stride = x_stride.data();
  all.B = Bs.data(), all.B_slot_stride = B_stride.data();
  all.dt = dts.data(), all.dt_slot_stride = dt_stride.data();
  all.A = rates.data();
  all.scale = scales.data(), all.scale_slot_stride = scale_stride.data();
  all.source = source.data(), all.target = target.data();
  all.ring_start = starts.data(), all.num_used = counts.data(), all.active = active.data();
  all.num_layers = 2, all.rows = rows, all.pad_slot = -1;
  if (!kTied) return true;
  const Layer before = layer;
  if (replayssm_materialize(all, false, nullptr) != cudaSuccess) return false;
  for (int head = 0; head < layer.heads; ++head) {
    std::vector<double> state = matrix_of(before, slot, head);
    for (int t = 0; t < used; ++t) {
      const auto& [then, token] = histories[slot].tokens[t];
      walk(before, calls[then], token, head, state, false);
    }
    if (!same_matrix(layer, 1, head, state)) return false;
    const bool second = chosen == 0;  // layer 1 writes slot 3 for request 0 alone
    if (!same_matrix(layer, 3, head, second ? state : matrix_of(before, 3, head))) return false;
    for (int other : {0, 2, 4}) {
      if (!same_matrix(layer, other, head, matrix_of(before, other, head))) return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace flashinfer

int main(int, char** argv) {
  flashinfer::Random random;
  for (int i = 0; i < std::atoi(argv[1]); ++i) {
    if (!flashinfer::check_steps(random) ||
        (flashinfer::kTied && !flashinfer::check_rings(random))) {
      std::printf("in case %d\n", i);
      return 1;
    }
  }
  return 0;
}
