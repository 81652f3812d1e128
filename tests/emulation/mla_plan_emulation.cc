// The planner of MLA for the device on random batches: every tile sees its KV once, parts are
// merged, and the longest share is about that of the planner for the host.
//
//   mla_plan_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include "mla_device_plan.cu"

#include <flashinfer/mla/own_plan.cuh>
#include <flashinfer/scheduler/mla_plan.h>

#include <map>
#include <random>
#include <set>
#include <vector>

namespace flashinfer {
namespace {

struct Random {
  std::mt19937 engine{3};
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  bool one_in(int n) { return integer(1, n) == 1; }
};

// A batch and its plan.
struct Case {
  MlaPlanParams params = {};
  std::vector<int32_t> kv_lens, qo_indptr;
  std::vector<uint4> ints;
  int64_t num_units;
  int num_heads, sharers;

  explicit Case(Random& random) {
    const int heads[] = {8, 16, 20, 40, 64, 96, 128};
    num_heads = heads[random.integer(0, 6)];
    params.num_heads = FastDivisor(num_heads);
    params.num_ctas = random.one_in(4) ? random.integer(4, 20) : 132;
    params.causal = random.one_in(2);
    sharers = random.one_in(4) ? random.integer(1, 3) : 1;
    params.sharers = FastDivisor(sharers);
    params.qo_len = sharers > 1 ? 1 : random.one_in(3) ? random.integer(0, 9) : 1;
    const int entries = random.one_in(2) ? random.integer(1, 8) : random.integer(1, 300);
    params.num_requests = entries * sharers;
    params.most_tokens = random.one_in(2) ? 20000 : 300;
    params.table_stride = random.integer(1, 50);
    const bool is_even = random.one_in(3);
    for (int i = 0; i < entries; ++i) {
      const int length = random.one_in(9) ? -5 : random.integer(0, params.most_tokens + 9);
      kv_lens.push_back(is_even && i > 0 ? kv_lens[0] : length);
    }
    params.num_tokens = params.num_requests * params.qo_len;
    if (sharers == 1 && random.one_in(3)) {
      qo_indptr.push_back(0);
      for (int i = 0; i < entries; ++i) {
        qo_indptr.push_back(qo_indptr.back() + random.integer(0, params.qo_len));
      }
      params.qo_indptr = qo_indptr.data();
    }
    params.kv_lens = kv_lens.data();
    const int tiles = ceil_div(params.qo_len * num_heads, 64);
    const int most = tiles > 4 ? ceil_div(num_heads, 64) : tiles;
    params.lanes = std::max(1, std::min({most, 4, params.num_ctas}));
    const int units_of_request = ceil_div(tiles, params.lanes);
    params.units_of_request = FastDivisor(std::max(units_of_request, 1));
    num_units = int64_t{params.num_requests} * units_of_request;
    const MlaPlanLayout layout(params.num_ctas);
    ints.assign(
        (layout.items_offset + (num_units + params.num_ctas) * params.lanes * sizeof(MlaWorkItem)) /
                16 +
            1,
        uint4{~0u, ~0u, ~0u, ~0u});
    char* const base = reinterpret_cast<char*>(ints.data());
    params.header = reinterpret_cast<MlaPlanHeader*>(base);
    params.cta_begin = reinterpret_cast<int32_t*>(base + layout.cta_begin_offset);
    params.merges = reinterpret_cast<MlaMerge*>(base + layout.merges_offset);
    params.counters = reinterpret_cast<MlaMergeCounters*>(base + layout.counters_offset);
    params.items = reinterpret_cast<MlaWorkItem*>(base + layout.items_offset);
  }

  MlaRequest request(int i) const {
    const int first = qo_indptr.empty() ? i * params.qo_len : qo_indptr[i];
    const int end = qo_indptr.empty() ? first + params.qo_len : qo_indptr[i + 1];
    const int hidden = sharers - 1 - i % sharers;
    const int length = std::max(0, kv_lens[i / sharers] - hidden);
    return {first, end - first, i * params.table_stride, std::min(length, params.most_tokens)};
  }
};

// The cost of the longest share.
template <typename Params>
int longest_share(const Params& plan, int num_ctas) {
  int longest = 0;
  for (int cta = 0; cta < num_ctas; ++cta) {
    int cost = 0;
    for (int i = plan.cta_begin[cta]; i < plan.cta_begin[cta + 1]; ++i) {
      cost += 5 + 2 * ceil_div(plan.items[i].kv_end - plan.items[i].kv_begin, 128);
    }
    longest = std::max(longest, cost);
  }
  return longest;
}

bool is_covered(const Case& problem, const MlaRequest& request, int row_begin,
                const std::vector<MlaWorkItem>& parts, const MlaMerge* merge) {
  const MlaPlanParams& params = problem.params;
  const int rows = request.qo_len * problem.num_heads, row_end = std::min(row_begin + 64, rows);
  int seen = request.kv_len;
  if (params.causal) {
    seen = std::max(0, seen - request.qo_len + (row_end - 1) / problem.num_heads + 1);
  }
  int covered = 0;
  for (const MlaWorkItem& part : parts) {  // in the order of columns
    if (part.kv_begin != covered && part.kv_begin != part.kv_end) return false;
    if (part.qo_len != request.qo_len || part.kv_len != request.kv_len) return false;
    if (part.kv_base != request.kv_base) return false;
    covered = std::max(covered, part.kv_end);
  }
  if (covered != seen) return false;
  if (merge == nullptr) return parts.size() == 1 && parts[0].slot < 0;
  if (merge->num_parts != static_cast<int>(parts.size())) return false;
  for (int i = 0; i < merge->num_parts; ++i) {
    if (parts[i].slot != merge->slot_begin + i * merge->slot_stride) return false;
    if (parts[i].merge != merge - params.merges) return false;
  }
  return true;
}

// Whether counters are zero, and of a CTA's items only the first and the last are parts.
bool can_be_merged(const MlaPlanParams& params) {
  for (int cta = 0; cta < params.num_ctas; ++cta) {
    if (params.counters[cta].started != 0 || params.counters[cta].parts != 0) return false;
    for (int i = params.cta_begin[cta] + 1; i < params.cta_begin[cta + 1] - 1; ++i) {
      if (params.items[i].slot >= 0) return false;
    }
  }
  return true;
}

__global__ void own_plan_kernel(const MlaPlanParams params) {
  static MlaOwnPlanner::Shared scratch;
  plan_own_share(params, reinterpret_cast<char*>(&scratch));
}

// Whether CTAs that plan for themselves write the same list.
bool is_same_by_ctas(const Case& problem) {
  const MlaPlanParams& params = problem.params;
  const MlaPlanLayout layout(params.num_ctas);
  std::vector<uint4> ints(problem.ints.size(), uint4{~0u, ~0u, ~0u, ~0u});
  char* const base = reinterpret_cast<char*>(ints.data());
  MlaPlanParams own = params;
  own.header = reinterpret_cast<MlaPlanHeader*>(base);
  own.cta_begin = reinterpret_cast<int32_t*>(base + layout.cta_begin_offset);
  own.merges = reinterpret_cast<MlaMerge*>(base + layout.merges_offset);
  own.items = reinterpret_cast<MlaWorkItem*>(base + layout.items_offset);
  own.counters = nullptr;
  launch_kernel(own_plan_kernel, dim3(params.num_ctas), dim3(384), 0, nullptr, false, own);
  const char* const other = reinterpret_cast<const char*>(problem.ints.data());
  const int64_t items_end =
      layout.items_offset + params.header->num_items * int64_t{sizeof(MlaWorkItem)};
  return std::memcmp(base, other, layout.counters_offset) == 0 &&
         std::memcmp(base + layout.items_offset, other + layout.items_offset,
                     items_end - layout.items_offset) == 0;
}

const char* find_fault(Random& random) {
  Case problem(random);
  const MlaPlanParams& params = problem.params;
  if (problem.num_units == 0) return nullptr;
  if (mla_device_plan(params, false, nullptr) != cudaSuccess) return "no launch";
  const int num_items = params.cta_begin[params.num_ctas];
  if (params.header->num_items != num_items || params.cta_begin[0] != 0) return "number of items";
  if (num_items > (problem.num_units + params.num_ctas) * params.lanes) return "too many items";
  if (params.header->num_merges > params.num_ctas) return "too many merges";
  if (!can_be_merged(params)) return "counters";
  static int tried = 0;  // by all CTAs takes longest
  if (problem.num_units <= MlaOwnPlanner::kThreads && tried++ % 4 == 0 &&
      !is_same_by_ctas(problem)) {
    return "plan by CTAs";
  }
  std::map<std::pair<int, int>, std::vector<MlaWorkItem>> parts;  // by kv_base and first row
  std::set<int> slots;
  for (int i = 0; i < num_items; ++i) {
    const MlaWorkItem& item = params.items[i];
    if (item.row_begin >= item.qo_len * problem.num_heads) continue;
    parts[{item.kv_base, item.row_begin}].push_back(item);
    if (item.slot < 0) continue;
    if (!slots.insert(item.slot).second || item.slot >= mla_most_slots(params.num_ctas)) {
      return "slots";
    }
  }
  std::map<std::pair<int, int>, const MlaMerge*> merges;
  for (int i = 0; i < params.header->num_merges; ++i) {
    const MlaMerge& merge = params.merges[i];
    merges[{merge.qo_begin, merge.row_begin}] = &merge;
  }
  size_t num_tiles = 0;
  std::vector<MlaRequest> requests;
  for (int r = 0; r < params.num_requests; ++r) {
    const MlaRequest request = problem.request(r);
    requests.push_back(request);
    for (int row = 0; row < request.qo_len * problem.num_heads; row += 64, ++num_tiles) {
      const auto found = merges.find({request.qo_begin, row});
      const MlaMerge* merge = found == merges.end() ? nullptr : found->second;
      if (!is_covered(problem, request, row, parts[{request.kv_base, row}], merge)) return "cover";
    }
  }
  if (parts.size() != num_tiles) return "tiles";
  if (params.qo_indptr != nullptr) return nullptr;  // the host counts the lanes that there are

  MlaPlanner planner;
  MlaPlan plan = {};
  planner.plan({problem.num_heads, params.num_ctas, params.causal, true}, requests, plan);
  std::vector<uint4> ints(plan.int_bytes / 16 + 1);
  planner.write(reinterpret_cast<char*>(ints.data()));
  const MlaPlanLayout layout(plan.num_ctas);
  const char* base = reinterpret_cast<const char*>(ints.data());
  struct {
    const int32_t* cta_begin;
    const MlaWorkItem* items;
  } host = {reinterpret_cast<const int32_t*>(base + layout.cta_begin_offset),
            reinterpret_cast<const MlaWorkItem*>(base + layout.items_offset)};
  const int ours = longest_share(params, params.num_ctas);
  const int theirs = longest_share(host, params.num_ctas);
  if (ours > theirs + theirs / 4 + 10) {
    std::printf("longest share %d, %d on the host\n", ours, theirs);
    return "balance";
  }
  return nullptr;
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  flashinfer::Random random;
  for (int i = 0; i < std::atoi(argv[1]); ++i) {
    if (const char* fault = flashinfer::find_fault(random)) {
      std::printf("%s in case %d\n", fault, i);
      return 1;
    }
  }
  return 0;
}
