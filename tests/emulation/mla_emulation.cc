// Random MLA problems through the planner, the portable kernel, the wide one (EMULATION_WIDE) or
// one for few rows (EMULATION_FEW, of 8 bits EMULATION_NARROW), and the merge, emulated on the CPU,
// against a reference in double precision.
//
//   mla_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#if defined(EMULATION_NARROW)
#include "mla_narrow.cu"
#elif defined(EMULATION_FEW)
#include "mla_few.cu"
#elif defined(EMULATION_WIDE)
#include "mla_sm90.cu"
#else
#include "mla_portable.cu"
#endif

#include <flashinfer/scheduler/mla_plan.h>

#include <type_traits>
#include <vector>

#include "random.h"

namespace flashinfer {
namespace {

using Q = dtype::FLASHINFER_CFG_DTYPE_Q;
using Ckv = dtype::FLASHINFER_CFG_DTYPE_KV;
using Kpe = dtype::FLASHINFER_CFG_DTYPE_KPE;
using O = dtype::FLASHINFER_CFG_DTYPE_O;
constexpr int kCkv = FLASHINFER_CFG_HEAD_DIM_CKV, kKpe = FLASHINFER_CFG_HEAD_DIM_KPE;
#if defined(EMULATION_WIDE)
constexpr bool kScaled = FLASHINFER_CFG_SCALED_GROUPS, kWide = true;
#else
constexpr bool kScaled = false, kWide = false;
#endif
constexpr bool kInClusters = emulation::kMaxClusterCtas > 1;

// Rows of `dim` values with a gap after each, which is NaN.
template <typename T>
struct Matrix {
  int dim, pitch;
  std::vector<T> values;

  Matrix(Random& random, int rows, int dim)
      : dim(dim), pitch(dim + 16), values(size_t(rows) * pitch, from_float<T>(NAN)) {
    for (int row = 0; row < rows; ++row) fill(random, row);
  }
  void fill(Random& random, int row) {
    for (int i = 0; i < dim; ++i) values[size_t(row) * pitch + i] = from_float<T>(random.normal(1));
  }
  const T* row(int64_t index) const { return &values[index * pitch]; }
};

// Writes the scales of a latent row's four groups after the row.
void scale_groups(Random& random, Matrix<Ckv>& ckv, int64_t row) {
  for (int group = 0; group < 4; ++group) {
    const float scale = std::exp(random.normal(0.5f));
    std::memcpy(&ckv.values[row * ckv.pitch + kCkv + 4 * group], &scale, sizeof(scale));
  }
}

// A scaled value is rounded to the queries' type before it is multiplied.
float value_of(const Matrix<Ckv>& ckv, int64_t row, int column) {
  const float value = to_float(ckv.row(row)[column]);
  if (!kScaled) return value;
  float scale;
  std::memcpy(&scale, ckv.row(row) + kCkv + column / 128 * 4, sizeof(scale));
  return to_float(from_float<Q>(value * scale));
}

struct Case {
  int heads, page_size, num_pages;
  bool causal, sinks;
  bool has_many_parts;  // one long request for many CTAs
  std::vector<MlaRequest> requests;
  bool in_pairs;  // CTAs that have both parts of a tile of few rows merge them
  std::vector<int32_t> indices;
  int tokens = 0;

  explicit Case(Random& random) {
    heads = random.one_in(3) ? random.integer(1, 20) : 16;
    page_size = random.one_in(2) ? 1 << random.integer(0, 6) : random.integer(1, 40);
    causal = random.one_in(2);
    sinks = random.one_in(3);
    has_many_parts = random.one_in(6);
    // A CTA merges up to eight rows with all of its warps.
    if (has_many_parts && random.one_in(2)) heads = random.integer(1, 8);
    if (kWide && kInClusters) heads = 128;  // then CTAs share KV rows in pairs
    in_pairs = !kWide && kInClusters && !random.one_in(4);
    if (in_pairs) {
      has_many_parts = false;
      heads = std::min(heads, 16);
    }
    const int batch = has_many_parts ? 1 : random.integer(1, 4);
    const int pair_steps = random.integer(1, 2);
    int pages = 0;
    for (int i = 0; i < batch; ++i) {
      int qo_len = random.one_in(6) ? 0 : random.integer(1, 5);
      if (kWide && kInClusters) qo_len = std::min(qo_len, 2);
      if (has_many_parts)
        qo_len = std::min(qo_len, std::max(1, heads > 8 ? 64 / heads : 8 / heads));
      int kv_len = random.one_in(6) ? random.integer(0, 3) : random.integer(1, 500);
      if (has_many_parts) kv_len = random.integer(1300, 3000);
      if (in_pairs) {
        qo_len = random.integer(1, 16 / heads);
        kv_len = 256 * pair_steps - random.integer(0, 127);
      }
      requests.push_back({tokens, qo_len, pages, kv_len});
      tokens += qo_len;
      pages += (kv_len + page_size - 1) / page_size;
    }
    num_pages = pages + 2;
    for (int i = 0; i < pages; ++i) indices.push_back(i);
    std::shuffle(indices.begin(), indices.end(), random.engine);
  }
};

#if defined(EMULATION_WIDE) || defined(EMULATION_NARROW) || defined(EMULATION_FEW)
// CTAs that plan for themselves need a table of page numbers, a row of it for each request.
struct OwnPlan {
  std::vector<int32_t> table, kv_lens, qo_indptr{0};
  std::vector<uint4> ints;
  std::vector<MlaMergeCounters> counters;
  MlaPlanParams params = {};

  OwnPlan(const Case& problem, int num_ctas) : counters(num_ctas) {
    int most_pages = 1, most_rows = 1;
    for (const MlaRequest& request : problem.requests) {
      kv_lens.push_back(request.kv_len);
      qo_indptr.push_back(request.qo_begin + request.qo_len);
      most_pages = std::max(most_pages, ceil_div(request.kv_len, problem.page_size));
      most_rows = std::max(most_rows, request.qo_len * problem.heads);
    }
    for (const MlaRequest& request : problem.requests) {
      const int pages = ceil_div(request.kv_len, problem.page_size);
      for (int i = 0; i < most_pages; ++i) {
        table.push_back(i < pages ? problem.indices[request.kv_base + i] : -7);
      }
    }
    const int tiles = ceil_div(most_rows, 64);
    const int most = tiles > 4 ? ceil_div(problem.heads, 64) : tiles;
    params.lanes = std::max(1, std::min({most, 4, num_ctas}));
    params.kv_lens = kv_lens.data();
    params.qo_indptr = qo_indptr.data();
    params.num_requests = static_cast<int>(kv_lens.size());
    params.num_tokens = problem.tokens;
    params.num_heads = FastDivisor(problem.heads);
    params.sharers = FastDivisor(1);
    params.table_stride = most_pages;
    params.most_tokens = most_pages * problem.page_size;
    const int units = ceil_div(tiles, params.lanes);
    params.units_of_request = FastDivisor(units);
    params.num_ctas = num_ctas;
    params.causal = problem.causal;
    const int64_t num_items = (int64_t{params.num_requests} * units + num_ctas) * params.lanes;
    const MlaPlanLayout layout(num_ctas);
    ints.assign((layout.items_offset + num_items * sizeof(MlaWorkItem)) / 16 + 1,
                uint4{~0u, ~0u, ~0u, ~0u});
    char* const base = reinterpret_cast<char*>(ints.data());
    params.header = reinterpret_cast<MlaPlanHeader*>(base);
    params.cta_begin = reinterpret_cast<int32_t*>(base + layout.cta_begin_offset);
    params.merges = reinterpret_cast<MlaMerge*>(base + layout.merges_offset);
    params.items = reinterpret_cast<MlaWorkItem*>(base + layout.items_offset);
    params.counters = counters.data();
  }

  void bind(MlaParams& launch, std::vector<float>& floats) const {
    floats.assign(mla_float_bytes(params.num_ctas, mla_most_slots(params.num_ctas), kCkv) / 4, NAN);
    launch.partial_lse = floats.data();
    launch.partial_o = floats.data() + mla_most_slots(params.num_ctas) * kMlaTileRows;
    launch.kv_indices = table.data();
    launch.header = params.header;
    launch.cta_begin = params.cta_begin;
    launch.merges = params.merges;
    launch.items = params.items;
    launch.counters = params.counters;
    launch.planner = params;
    launch.in_pairs = false;
    launch.plans_itself = true;
    launch.plan_is_older = false;
  }
};
#endif

bool check(Random& random) {
  const Case problem(random);
  const int rows = std::max(problem.tokens, 1) * problem.heads;
  Matrix<Q> q_nope(random, rows, kCkv), q_pe(random, rows, kKpe);
  Matrix<Ckv> ckv(random, problem.num_pages * problem.page_size, kCkv);
  Matrix<Kpe> kpe(random, problem.num_pages * problem.page_size, kKpe);
  const auto slot_of = [&](const MlaRequest& request, int token) {
    return int64_t{problem.indices[request.kv_base + token / problem.page_size]} *
               problem.page_size +
           token % problem.page_size;
  };
  for (int row = 0; kScaled && row < problem.num_pages * problem.page_size; ++row) {
    scale_groups(random, ckv, row);
  }
  // What no request has is NaN.
  std::vector<bool> used(problem.num_pages * problem.page_size);
  for (const MlaRequest& request : problem.requests) {
    for (int token = 0; token < request.kv_len; ++token) used[slot_of(request, token)] = true;
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    std::fill_n(ckv.values.begin() + i * ckv.pitch, kCkv, from_float<Ckv>(NAN));
    std::fill_n(kpe.values.begin() + i * kpe.pitch, kKpe, from_float<Kpe>(NAN));
  }

  MlaPlanner planner;
  MlaPlan plan = {};
  int num_ctas = problem.has_many_parts ? 24 : random.integer(1, 9);
  if (kInClusters) num_ctas = (num_ctas + 1) / 2 * 2;
  if (problem.in_pairs) num_ctas = 2 * problem.requests.size() + random.integer(0, 1);
  const MlaPlanConfig config = {problem.heads, num_ctas, problem.causal, !random.one_in(4)};
  planner.plan(config, problem.requests, plan);
  std::vector<uint4> ints(plan.int_bytes / 16 + 1);
  std::memset(ints.data(), 0xff, ints.size() * 16);
  planner.write(reinterpret_cast<char*>(ints.data()));
  std::vector<float> floats(mla_float_bytes(plan.num_ctas, plan.num_slots, kCkv) / 4, NAN);
  std::vector<O> out(size_t(rows) * kCkv, from_float<O>(NAN));
  std::vector<float> lse(rows, NAN), sinks(problem.heads);
  for (float& sink : sinks) sink = random.normal(2.f);

  MlaParams params = {};
  params.q_nope = {q_nope.values.data(), int64_t{q_nope.pitch} * problem.heads, q_nope.pitch};
  params.q_pe = {q_pe.values.data(), int64_t{q_pe.pitch} * problem.heads, q_pe.pitch};
  params.o = {out.data(), int64_t{kCkv} * problem.heads, kCkv};
  params.ckv = {ckv.values.data(), int64_t{ckv.pitch} * problem.page_size, ckv.pitch};
  params.kpe = {kpe.values.data(), int64_t{kpe.pitch} * problem.page_size, kpe.pitch};
  params.kv_indices = problem.indices.data();
  params.lse = lse.data();
  params.sinks = problem.sinks ? sinks.data() : nullptr;
  const MlaPlanLayout layout(plan.num_ctas);
  char* base = reinterpret_cast<char*>(ints.data());
  params.header = reinterpret_cast<const MlaPlanHeader*>(base);
  params.cta_begin = reinterpret_cast<const int32_t*>(base + layout.cta_begin_offset);
  params.merges = reinterpret_cast<const MlaMerge*>(base + layout.merges_offset);
  params.counters = reinterpret_cast<MlaMergeCounters*>(base + layout.counters_offset);
  params.items = reinterpret_cast<const MlaWorkItem*>(base + layout.items_offset);
  params.partial_lse = floats.data();
  params.partial_o = floats.data() + mla_most_slots(plan.num_ctas) * kMlaTileRows;
  params.num_heads = FastDivisor(problem.heads);
  params.page_size = FastDivisor(problem.page_size);
  params.num_tokens = std::max(problem.tokens, 1);
  params.num_pages = problem.num_pages;
  params.num_ctas = plan.num_ctas;
  params.num_items = plan.num_items;
  params.in_pairs = kInClusters && plan.in_pairs;
  // Larger ones make references move.
  const float sm_scale = (random.one_in(2) ? 1.f : 5.f) / std::sqrt(128.f + kKpe);
  params.sm_scale_log2 = sm_scale * 1.44269504f;
  params.o_scale = random.one_in(2) ? 1.f : 0.5f;
  params.lse_factor = random.one_in(2) ? 1.f : 0.69314718f;
  params.rope_factor = sizeof(Ckv) == 1 && !kScaled && random.one_in(2) ? 0.3f : 1.f;
  params.causal = problem.causal;
  params.plan_is_older = !random.one_in(3);
#if defined(EMULATION_WIDE) || defined(EMULATION_NARROW) || defined(EMULATION_FEW)
  OwnPlan own(problem, num_ctas);
  static std::mt19937 coin(7);  // leaves the problems as they are
  if (coin() % 2 == 0) own.bind(params, floats);
#if !defined(EMULATION_WIDE)
  params.merges_itself = coin() % 2 == 0 || params.in_pairs;  // for any number of parts
#endif
  const bool merges = plan.num_merges > 0 || params.plans_itself;
#else
  const bool merges = plan.num_merges > 0;
#endif
  // The second launch finds the plan's counters as the first one left them.
  for (int launch = 0; launch < 2; ++launch) {
    std::fill(out.begin(), out.end(), from_float<O>(NAN));
    const cudaError_t status = mla(params, merges, false, nullptr);
    if (status != cudaSuccess) emulation::fail("no launch");
  }

  for (const MlaRequest& request : problem.requests) {
    for (int q = 0; q < request.qo_len; ++q) {
      for (int head = 0; head < problem.heads; ++head) {
        const int row = (request.qo_begin + q) * problem.heads + head;
        const int seen =
            problem.causal ? std::max(0, request.kv_len - request.qo_len + q + 1) : request.kv_len;
        std::vector<double> expected(kCkv), magnitude(kCkv), values(kCkv);
        double sum = problem.sinks ? std::exp(double{sinks[head]}) : 0.;
        for (int token = 0; token < seen; ++token) {
          const int64_t slot = slot_of(request, token);
          double logit = 0.;
          for (int i = 0; i < kCkv; ++i)
            logit += double{to_float(q_nope.row(row)[i])} * value_of(ckv, slot, i);
          for (int i = 0; i < kKpe; ++i)
            logit += params.rope_factor * double{to_float(q_pe.row(row)[i])} *
                     to_float(kpe.row(slot)[i]);
          const double weight = std::exp(logit * sm_scale);
          sum += weight;
          for (int i = 0; i < kCkv; ++i) {
            expected[i] += weight * value_of(ckv, slot, i);
            magnitude[i] += weight * std::fabs(value_of(ckv, slot, i));
            values[i] += std::fabs(value_of(ckv, slot, i));
          }
        }
        const double log_sum = std::log2(sum) * params.lse_factor;
        if (!(lse[row] == log_sum || std::fabs(lse[row] - log_sum) < 2e-3)) {
          std::printf("lse of row %d: got %g, expected %g\n", row, lse[row], log_sum);
          return false;
        }
        for (int i = 0; i < kCkv; ++i) {
          const double factor = sum == 0. ? 0. : params.o_scale / sum;
          const double got = to_float(out[size_t(row) * kCkv + i]);
          // Weights in float16 vanish where they are 2^-25 of the largest one, or less. Parts and
          // outputs in it are rounded by 2^-25 each at least.
          double vanished = sizeof(Ckv) == 1 ? values[i] * 0x1p-25 * params.o_scale : 1e-30;
          if (std::is_same_v<O, dtype::float16>) vanished += 2 * 0x1p-25;
          // Weights, parts and outputs are rounded, by 2^-8 each at most.
          const double most = 3 * 0x1p-8 * (magnitude[i] * factor) + vanished;
          if (!(std::fabs(got - expected[i] * factor) <= most)) {
            std::printf("output %d of row %d: got %g, expected %g\n", i, row, got,
                        expected[i] * factor);
            return false;
          }
        }
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  using namespace flashinfer;
  return run_cases(std::atoi(argv[1]), Random(5), check);
}
