// Random attention problems through the planner and the kernels of csrc/attention.cu, emulated on
// the CPU, against a reference in double precision.
//
//   attention_emulation <seed> <cases> [huge]    huge: strides beyond 32 bits
//
// Prints what is wrong with the first bad one and exits with 1; 77: cannot run here.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/scheduler/attention_plan.h>

#include "attention_reference.h"

namespace flashinfer {
namespace {

// Bounds of the LSE's error, and of the output's relative to 1 + its magnitude. Keys that are
// rotated or transformed are rounded once more, which moves large logits. Weights that no softmax
// divides by their sum add up the roundings of hundreds of them. Codes of 8 bits are off by a
// sixteenth.
double tolerance(const Case& problem, const Group& group) {
  if (kIsCode<O>) return 0.012 + 0.0625;
  if (!ConfiguredVariant::use_softmax) return 0.06;
  const bool rotates = kEncodings[group.kind] == PosEncoding::rope_llama;
  if (!rotates && !ConfiguredVariant::kHasKeyTransform) return 0.012;
  const double sharpness = std::fabs(problem.options_of(group).sm_scale) * std::sqrt(kHeadDimQK);
  return 0.016 * std::max(1., sharpness);
}

PlanConfig draw_plan_config(const Case& problem, Random& random) {
  PlanConfig config = {};
  config.num_kv_heads = problem.num_kv_heads;
  config.group_size = problem.group_size;
  config.head_dim_vo = kHeadDimVO;
  config.tile_q = kTileQ;
  config.tile_q_second = kTileQSecond;
  config.tile_kv = 64;
  config.cta_slots = random.integer(1, 12);
  config.lone_speed = random.integer(1, 2);
  config.piece_tiles = random.integer(1, 2);
  if (random.one_in(3)) {
    config.fixed_split_size = 64 * random.integer(1, 2);
  } else {
    config.disable_split_kv = random.one_in(4);
  }
  config.graph_batch_size = -1;
  if (random.one_in(4)) {
    config.graph_batch_size = 8;
    config.graph_qo_tokens = 8 * 70;
  }
  return config;
}

#if FLASHINFER_CFG_DEVICE_LENGTHS
// Runs the requests by their lengths, with random columns.
void run(const PlanConfig& config, const std::vector<RequestGroup>& groups, Params params) {
  const std::vector<PlanRequest>& requests = groups[0].requests;
  std::vector<int32_t> qo_indptr = {0}, kv_indptr = {0}, kv_len;
  int longest = 1;
  for (const PlanRequest& r : requests) {
    qo_indptr.push_back(r.qo_begin + r.qo_len);
    kv_indptr.push_back(r.kv_base + ceil_div(r.kv_len, int(params.page_size.divisor)));
    kv_len.push_back(r.kv_len);
    longest = std::max(longest, r.qo_len);
  }
  DevicePlanParams& lengths = params.lengths;
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_indptr = kv_indptr.data();
  lengths.kv_len = kv_len.data();
  lengths.batch_size = requests.size();
  lengths.qo_len = longest;
  lengths.qo_tokens = qo_indptr.back();
  lengths.kv_entries = kv_indptr.back();
  lengths.page_size = params.page_size.divisor;
  lengths.window_left = groups[0].window_left;
  lengths.causal = groups[0].causal;
  lengths.group_size = params.group_size;
  lengths.tiles_per_request = FastDivisor(ceil_div(longest * config.group_size, int64_t{kTileQ}));
  lengths.tile_q = kTileQ;
  lengths.num_columns = config.cta_slots;
  const int tiles = requests.size() * lengths.tiles_per_request.divisor;
  lengths.num_merges = std::min(lengths.num_columns - 1, tiles);
  // As much as possible by a table of pages, in which each request has a row of the same length.
  std::vector<int32_t> table;
  int width = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    width = std::max(width, kv_indptr[i + 1] - kv_indptr[i]);
  }
  const bool is_even = std::all_of(requests.begin(), requests.end(),
                                   [&](const PlanRequest& r) { return r.qo_len == longest; });
  if (is_even) {
    for (const PlanRequest& r : requests) {
      const int32_t* const pages = params.tensors[0].kv_indices + r.kv_base;
      const int count = ceil_div(r.kv_len, int(params.page_size.divisor));
      table.insert(table.end(), pages, pages + count);
      table.insert(table.end(), width - count, 0);
    }
    params.tensors[0].kv_indices = table.data();
    lengths.qo_indptr = lengths.kv_indptr = nullptr;
    lengths.kv_entries = table.size();
    lengths.pages_per_request = width;
  }
  finish_device_plan(lengths);
  const int rows = params.num_kv_heads.divisor * kTileQ;
  const int slots = lengths.num_columns - 1 + lengths.num_merges;
  std::vector<float4> outputs(slots * rows * kHeadDimVO / 4 + 1,
                              float4{math::nan, math::nan, math::nan, math::nan});
  std::vector<float2> sums(slots * rows + 1, float2{math::nan, math::nan});
  params.partial_o = reinterpret_cast<float*>(outputs.data());
  params.partial_sums = sums.data();
  params.num_ctas = FastDivisor(lengths.num_columns);
  params.num_merges = lengths.num_merges;
  params.rows_per_slot = kTileQ;
  params.merged_rows = config.piece_tiles == 1 ? 1 : std::min(kTileQ, 4);
  if (attention(params, false, nullptr) != cudaSuccess) emulation::fail("no launch");
}
#else
// Plans and runs `groups` of the problem; `params` are the problem's.
void run(const PlanConfig& config, const std::vector<RequestGroup>& groups, Params params) {
  AttentionPlanner planner;
  const RequestGroup* second = groups.size() > 1 ? &groups[1] : nullptr;
  if (!planner.plan(config, groups[0], second, -1)) emulation::fail("no plan");
  const PlanLayout& layout = planner.layout();
  if (layout.num_ctas == 0) return;
  std::vector<uint4> plan(layout.int_bytes / 16 + 1);
  planner.write(plan.data());
  // NaN, so that a part that nobody writes is seen.
  std::vector<float4> workspace(layout.float_bytes / 16 + 1,
                                float4{math::nan, math::nan, math::nan, math::nan});
  params.items =
      reinterpret_cast<WorkItem*>(reinterpret_cast<char*>(plan.data()) + layout.items_offset);
  params.merges =
      reinterpret_cast<MergeItem*>(reinterpret_cast<char*>(plan.data()) + layout.merges_offset);
  params.partial_o = reinterpret_cast<float*>(workspace.data());
  params.partial_sums =
      reinterpret_cast<float2*>(reinterpret_cast<char*>(workspace.data()) + layout.sums_offset);
  params.num_ctas = FastDivisor(layout.num_ctas);
  params.num_merges = layout.num_merges;
  params.rows_per_slot = layout.rows_per_slot;
  params.merged_rows = layout.merged_rows;
  if (layout.counters_offset >= 0) {
    params.counters =
        reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(plan.data()) + layout.counters_offset);
  }
  if (attention(params, false, nullptr) != cudaSuccess) emulation::fail("no launch");
  for (uint32_t i = 0; params.counters && i < layout.num_merges * params.num_kv_heads.divisor;
       ++i) {
    if (params.counters[i] != 0) emulation::fail("a counter that is not 0 for the next launch");
  }
}
#endif

struct Errors {
  double output = 0, lse = 0;
  int invalid = 0;  // results that should be a number, or not

  void compare(double& worst, double actual, double expected, double unit) {
    if (actual == expected || (std::isnan(actual) && std::isnan(expected))) return;
    const double error = std::fabs(actual - expected) / unit;
    if (std::isfinite(error)) {
      worst = std::max(worst, error);
    } else {
      ++invalid;
    }
  }
  bool are_within(double bound) const { return invalid == 0 && output <= bound && lse <= bound; }
};

Errors compare(const Case& problem, const Group& group) {
  Errors errors;
  for (size_t i = 0; i < group.plan.requests.size(); ++i) {
    const PlanRequest& request = group.plan.requests[i];
    for (int kv_head = 0; request.qo_len > 0 && kv_head < problem.num_kv_heads; ++kv_head) {
      Reference reference(problem, group, static_cast<int>(i), kv_head);
      for (int row = 0; row < request.qo_len * problem.group_size; ++row) {
        const int qo_idx = row / problem.group_size;
        const int head = kv_head * problem.group_size + row % problem.group_size;
        const int token = request.qo_begin + qo_idx;
        reference.run(qo_idx, head);
        const O* output = group.o->row(0, token, head);
        double scale = 1, largest = 0;
        if (kIsCode<O>) scale = group.o_scale[token * group.o_stride_scale + head];
        for (int j = 0; j < kHeadDimVO; ++j) {
          const double expected = reference.output[j], actual = to_float(output[j]) * scale;
          errors.compare(errors.output, actual, expected, 1 + std::fabs(expected));
          largest = std::max(largest, std::fabs(to_float(output[j]) + 0.));
        }
        // All of a code's range is used, but by a row that saw no key.
        if (kIsCode<O> && largest != 448 && largest != 0) ++errors.invalid;
        if (!group.lse.empty()) {
          const double lse = group.lse[token * problem.num_qo_heads + head];
          errors.compare(errors.lse, lse, reference.lse, 1);
        }
      }
    }
  }
  return errors;
}

// The kernel's output for a request, as bits.
std::vector<uint16_t> result_of(const Case& problem, const Group& group,
                                const PlanRequest& request) {
  std::vector<uint16_t> bits;
  for (int token = request.qo_begin; token < request.qo_begin + request.qo_len; ++token) {
    for (int head = 0; head < problem.num_qo_heads; ++head) {
      const O* row = group.o->row(0, token, head);
      for (int i = 0; i < kHeadDimVO; ++i) bits.push_back(row[i].bits);
      if (kIsCode<O>) {
        const float scale = group.o_scale[token * group.o_stride_scale + head];
        bits.push_back(static_cast<uint16_t>(__float_as_uint(scale) >> 8));
      }
      if (group.lse.empty()) continue;
      const uint32_t lse = __float_as_uint(group.lse[token * problem.num_qo_heads + head]);
      bits.push_back(static_cast<uint16_t>(lse));
      bits.push_back(static_cast<uint16_t>(lse >> 16));
    }
  }
  return bits;
}

// Whether each request alone, with another number of CTAs, has bit for bit the result that it had
// in the batch: what a fixed split size promises.
bool is_batch_invariant(Case& problem, PlanConfig config, Random& random) {
  Group& group = problem.groups[0];
  config.cta_slots += random.integer(1, 12);
  config.graph_batch_size = -1;
  for (size_t i = 0; i < group.plan.requests.size(); ++i) {
    const PlanRequest& request = group.plan.requests[i];
    const std::vector<uint16_t> before = result_of(problem, group, request);
    Params params = problem.params();
    const auto begin_here = [i](VariantParams& options) {  // this request is now the first
      options.mask_indptr += i;
      options.prefix_len_ptr += i;
      options.token_pos_in_items_ptr += i * options.token_pos_in_items_len;
    };
    begin_here(params.variant);
    change_second(params, begin_here);
#if defined(EMULATION_RANGES)
    params.variant.qo_indptr += i;
#endif
    RequestGroup alone = group.plan;
    alone.requests = {request};
    run(config, {alone}, params);
    if (result_of(problem, group, request) != before) return false;
  }
  return true;
}

// Whether a query alone has bit for bit the result that it had among those of its request, if
// nothing is cut or all is cut at fixed tokens: a token then is the same in a prompt, in a part of
// it and alone.
bool is_query_invariant(Case& problem, PlanConfig config, Random& random) {
  Group& group = problem.groups[0];
  config.fixed_split_size = random.one_in(2) ? 4096 : 64 * random.integer(1, 2);
  config.disable_split_kv = false;
  config.graph_batch_size = -1;
  run(config, {group.plan}, problem.params());
  for (const PlanRequest& request : group.plan.requests) {
    if (request.qo_len < 2) continue;
    const int query = random.integer(0, request.qo_len - 1);
    PlanRequest one = request;
    one.qo_begin += query;
    one.qo_len = 1;
    one.kv_len -= request.qo_len - 1 - query;
    if (one.kv_len < 1) continue;
    const std::vector<uint16_t> before = result_of(problem, group, one);
    RequestGroup alone = group.plan;
    alone.requests = {one};
    run(config, {alone}, problem.params());
    if (result_of(problem, group, one) != before) return false;
  }
  return true;
}

void print(const Case& problem, const PlanConfig& config, const Group& group) {
  std::printf("  %d x %d heads, pages of %d, window %d, scale %g, ", problem.num_kv_heads,
              problem.group_size, group.paged ? problem.page_size : 0, group.plan.window_left,
              double{problem.options_of(group).sm_scale});
  std::printf("split %lld%s, %lld CTA slots%s; qo/kv:", (long long)config.fixed_split_size,
              config.disable_split_kv ? " disabled" : "", (long long)config.cta_slots,
              config.is_graph() ? ", graph" : "");
  for (const PlanRequest& r : group.plan.requests) std::printf(" %d/%d", r.qo_len, r.kv_len);
  std::printf("\n");
}

bool check(uint32_t seed, bool huge_strides) {
  Case problem(seed, huge_strides);
  Random random(seed + 1);
  const PlanConfig config = draw_plan_config(problem, random);
  std::vector<RequestGroup> groups;
  for (const Group& group : problem.groups) groups.push_back(group.plan);
  run(config, groups, problem.params());
  bool good = true;
  for (const Group& group : problem.groups) {
    const Errors errors = compare(problem, group);
    std::printf("seed %u: errors of output %.5f, of LSE %.5f\n", seed, errors.output, errors.lse);
    if (errors.are_within(tolerance(problem, group))) continue;
    good = false;
    std::printf("WRONG, %d values not numbers or not as expected:\n", errors.invalid);
    print(problem, config, group);
  }
  // Lengths on the device are cut by equal shares alone.
  constexpr bool kIsPlanned = !Params::kReadsLengths;
  if (kIsPlanned && good && config.fixed_split_size > 0 && groups.size() == 1) {
    good = is_batch_invariant(problem, config, random);
    if (!good) {
      std::printf("WRONG, a request alone has another result than in the batch:\n");
      print(problem, config, problem.groups[0]);
    }
  }
  // With two tile shapes a query alone may get the other one; plans of fixed splits have one.
  const bool is_plain =
      kIsPlanned && kMask == MaskMode::causal && !kCustomVariant && kTileQSecond == 0;
  if (good && is_plain && problem.groups[0].mask == kMask) {
    good = is_query_invariant(problem, config, random);
    if (!good) {
      std::printf("WRONG, a query alone has another result than in its request:\n");
      print(problem, config, problem.groups[0]);
    }
  }
  return good;
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const uint32_t seed = std::atoi(argv[1]);
  const bool huge_strides = argc > 3 && std::strcmp(argv[3], "huge") == 0;
  bool good = true;
  for (int i = 0; good && i < std::atoi(argv[2]); ++i) {
    good = flashinfer::check(seed + 1000 * i, huge_strides);
  }
  return good ? 0 : 1;
}
