// Plan objects of attention, by handle. All index tensors are on the host.
//
// attention_plan_create(handle)                    int64 [1], receives the handle
// attention_plan_destroy(handle)
// attention_plan_configure(handle, num_kv_heads, group_size, head_dim_vo, tile_q, cta_slots,
//     tile_q_second, tile_kv, fixed_split_size, disable_split_kv, graph_batch_size,
//     graph_qo_tokens, graph_qo_len, lone_speed, piece_tiles, least_rows, most_rows)
//     the fields of PlanConfig
// attention_plan(handle, plan_info, int_workspace | None, float_workspace_bytes, group[, group])
//   group: naming, qo_indptr | None, kv_indptr, kv_len | None, last_page_len | None, page_size,
//     causal, window_left, tokens_per_request
//     naming: which wrapper's names errors use, see kNames. page_size 0: ragged. qo_indptr None:
//     every request has tokens_per_request tokens. With a second group its requests are of kind 1.
//   int_workspace: a CUDA tensor is filled by one asynchronous copy on the current stream, a CPU
//     tensor in place; None: only plan_info is wanted.
//   plan_info, int64 [17]:
//     0 num_ctas  1 num_merges  2 rows_per_slot  3 offset of the items  4 offset of the merges
//     5 num_slots  6 bytes needed of the int workspace  7 and of the float workspace
//     8 tokens in q  9 batch_size  10 entries needed in kv_indices (ragged: rows of k and v)
//     11 tile_q  12, 13, 14 as 8, 9, 10 for the second group  15 offset of partial_sums in the
//     float workspace, where partial_o is at 0  16 rows that one CTA of the merge takes
// attention_choose(choice, model, group)
//   choice, float64 [5]: rows of a tile of the portable kernel, microseconds that this kernel would
//     take, that Hopper's would, and that two launches would: of the portable kernel for the
//     requests that fit the second tile, of Hopper's for the others; the most rows of the former
//   model, float64 [24 + 9 n]: the fields of KernelModel in their order, then of its n tiles
#include <flashinfer/scheduler/attention_choice.h>
#include <flashinfer/scheduler/attention_plan.h>

#include "index_binding.h"
#include "plan_staging.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr int kInfoSize = 17;

// What a wrapper calls these arguments, by `naming`.
struct Names {
  const char *qo_indptr, *kv_indptr, *kv_len, *last_page_len;
  bool first_row_is_0;  // else the rows in front of the first request are others' to write
};
constexpr Names kNames[] = {
    {"qo_indptr", "indptr", "seq_lens", "last_page_len", false},
    {"qo_indptr", "paged_kv_indptr", "seq_lens", "paged_kv_last_page_len", true},
    {"qo_indptr", "kv_indptr", "seq_lens", "last_page_len", true},
    {"qo_indptr", "kv_indptr", "kv_len_arr", "last_page_len", false},
    {"qo_indptr_p", "kv_indptr_p", "seq_lens_p", "last_page_len_p", false},
    {"qo_indptr_d", "kv_indptr_d", "seq_lens_d", "last_page_len_d", false},
};

struct Plan {
  PlanConfig config = {};
  RequestGroup groups[2];
  AttentionPlanner planner;
  StagingRing staging;
};

Plan& plan_of(ffi::Args& args) {
  const int64_t handle = args.integer("handle");
  if (handle == 0) ffi::raise("ValueError", "`handle` must be that of a plan, got 0");
  return *reinterpret_cast<Plan*>(handle);
}

int64_t integer_in(ffi::Args& args, const char* name, int64_t low, int64_t high) {
  const int64_t value = args.integer(name);
  if (value < low || value > high) {
    ffi::raise("ValueError", "`%s` must be from %lld to %lld, got %lld", name,
               static_cast<long long>(low), static_cast<long long>(high),
               static_cast<long long>(value));
  }
  return value;
}

const int32_t* host_indices(const Tensor& tensor, int64_t length) {
  ffi::check_indices(tensor, length);
  if (tensor.dl->device.device_type != kDLCPU && tensor.dl->device.device_type != kDLCUDAHost) {
    ffi::raise("ValueError", "`%s` must be on the host here, got a tensor on a GPU", tensor.name);
  }
  return static_cast<const int32_t*>(tensor.data());
}

[[noreturn]] void raise_element(const char* name, int64_t index, int64_t value, const char* rule,
                                int64_t bound) {
  ffi::raise("ValueError", "`%s`[%lld] must be %s %lld, got %lld", name,
             static_cast<long long>(index), rule, static_cast<long long>(bound),
             static_cast<long long>(value));
}

struct GroupArguments {
  Tensor qo_indptr, kv_indptr, kv_len, last_page_len;
  int64_t page_size, tokens_per_request;
  bool first_row_is_0;
};

GroupArguments take_group(ffi::Args& args, RequestGroup& group) {
  const int64_t naming = integer_in(args, "naming", 0, std::size(kNames) - 1);
  const Names& names = kNames[naming];
  GroupArguments result;
  result.qo_indptr = args.optional_tensor(names.qo_indptr);
  result.kv_indptr = args.tensor(names.kv_indptr);
  result.first_row_is_0 = names.first_row_is_0;
  result.kv_len = args.optional_tensor(names.kv_len);
  result.last_page_len = args.optional_tensor(names.last_page_len);
  result.page_size = integer_in(args, "page_size", 0, INT32_MAX);
  group.causal = args.optional_flag("causal") == ffi::Args::Flag::kTrue;
  group.window_left = args.integer("window_left");
  result.tokens_per_request = integer_in(args, "tokens_per_request", 0, INT32_MAX);
  if (result.page_size == 0 && (result.kv_len || result.last_page_len)) {
    ffi::raise("ValueError", "`%s` is for paged caches: without pages `%s` says all lengths",
               result.kv_len ? names.kv_len : names.last_page_len, names.kv_indptr);
  }
  if (result.page_size > 0 && !result.kv_len && !result.last_page_len) {
    ffi::raise("ValueError", "`%s` or `%s` must say how long the requests are", names.kv_len,
               names.last_page_len);
  }
  return result;
}

// Length in tokens of request i with `pages` pages, from whichever tensors there are.
int64_t paged_length(const GroupArguments& arguments, const int32_t* kv_len,
                     const int32_t* last_page_len, int64_t i, int64_t pages) {
  const int64_t page_size = arguments.page_size;
  int64_t length = 0;
  if (last_page_len) {
    const int64_t last = last_page_len[i];
    // Engines pad a batch with requests that have no page and any last_page_len.
    const int64_t low = pages > 0 ? 1 : 0;
    if (last < low || last > page_size) {
      ffi::raise("ValueError",
                 "`%s`[%lld] must be from %lld to the page size %lld for a request of %lld pages, "
                 "got %lld",
                 arguments.last_page_len.name, static_cast<long long>(i),
                 static_cast<long long>(low), static_cast<long long>(page_size),
                 static_cast<long long>(pages), static_cast<long long>(last));
    }
    length = pages > 0 ? (pages - 1) * page_size + last : 0;
    if (kv_len && kv_len[i] != length) {
      ffi::raise("ValueError", "`%s`[%lld] is %d, but by `%s` and `%s` the request has %lld tokens",
                 arguments.kv_len.name, static_cast<long long>(i), kv_len[i],
                 arguments.kv_indptr.name, arguments.last_page_len.name,
                 static_cast<long long>(length));
    }
  } else {
    length = kv_len[i];
    if (length < 0) raise_element(arguments.kv_len.name, i, length, "at least", 0);
    if (length > pages * page_size) {
      ffi::raise("ValueError",
                 "`%s`[%lld] must be at most %lld, as the request has %lld pages of %lld tokens, "
                 "got %lld",
                 arguments.kv_len.name, static_cast<long long>(i),
                 static_cast<long long>(pages * page_size), static_cast<long long>(pages),
                 static_cast<long long>(page_size), static_cast<long long>(length));
    }
  }
  if (length > INT32_MAX) {
    ffi::raise("ValueError", "`%s`: request %lld has %lld tokens, there must be fewer than 2^31",
               arguments.kv_indptr.name, static_cast<long long>(i), static_cast<long long>(length));
  }
  return length;
}

struct GroupTotals {
  int64_t qo_tokens, batch_size, kv_entries, longest_qo;
};

// Checks every number and gathers the requests.
GroupTotals read_group(const GroupArguments& arguments, int64_t group_size, RequestGroup& group) {
  const Tensor& kv_name = arguments.kv_indptr;
  const int64_t batch_size = ffi::check_indptr(kv_name);
  const int32_t* kv_indptr = host_indices(kv_name, -1);
  const int32_t* qo_indptr = nullptr;
  const int32_t* kv_len = nullptr;
  const int32_t* last_page_len = nullptr;
  if (arguments.qo_indptr) qo_indptr = host_indices(arguments.qo_indptr, batch_size + 1);
  if (arguments.kv_len) kv_len = host_indices(arguments.kv_len, batch_size);
  if (arguments.last_page_len) last_page_len = host_indices(arguments.last_page_len, batch_size);
  // Above 0 in a slice of a larger batch, whose tensors are given whole.
  if (kv_indptr[0] < 0) raise_element(kv_name.name, 0, kv_indptr[0], "at least", 0);
  if (qo_indptr && qo_indptr[0] < 0) {
    raise_element(arguments.qo_indptr.name, 0, qo_indptr[0], "at least", 0);
  }
  if (qo_indptr && qo_indptr[0] > 0 && arguments.first_row_is_0) {
    ffi::raise("ValueError", "`%s` must begin with 0, got %d", arguments.qo_indptr.name,
               qo_indptr[0]);
  }
  const int64_t even = arguments.tokens_per_request;
  if (!qo_indptr && batch_size * even > INT32_MAX) {
    ffi::raise("ValueError", "%lld requests of %lld tokens are too many: at most 2^31 - 1 tokens",
               static_cast<long long>(batch_size), static_cast<long long>(even));
  }

  group.requests.resize(batch_size);
  int64_t longest = qo_indptr ? 0 : even;
  for (int64_t i = 0; i < batch_size; ++i) {
    PlanRequest& request = group.requests[i];
    request.kv_base = kv_indptr[i];
    const int64_t entries = static_cast<int64_t>(kv_indptr[i + 1]) - kv_indptr[i];
    if (entries < 0) raise_element(kv_name.name, i + 1, kv_indptr[i + 1], "at least", kv_indptr[i]);
    request.kv_len = static_cast<int32_t>(
        arguments.page_size ? paged_length(arguments, kv_len, last_page_len, i, entries) : entries);
    if (qo_indptr) {
      if (qo_indptr[i + 1] < qo_indptr[i]) {
        raise_element(arguments.qo_indptr.name, i + 1, qo_indptr[i + 1], "at least", qo_indptr[i]);
      }
      request.qo_begin = qo_indptr[i];
      request.qo_len = qo_indptr[i + 1] - qo_indptr[i];
      longest = std::max<int64_t>(longest, request.qo_len);
    } else {
      request.qo_begin = static_cast<int32_t>(i * even);
      request.qo_len = static_cast<int32_t>(even);
    }
  }
  if (longest * group_size > INT32_MAX - 1024) {
    ffi::raise("ValueError",
               "`%s`: a request of %lld tokens with %lld query heads for each KV head is too long: "
               "their product must be below 2^31 - 1024",
               arguments.qo_indptr.name, static_cast<long long>(longest),
               static_cast<long long>(group_size));
  }
  return {qo_indptr ? qo_indptr[batch_size] : batch_size * even, batch_size, kv_indptr[batch_size],
          batch_size ? longest : 0};
}

// Takes the numbers of a model one by one.
class ModelReader {
 public:
  static constexpr int64_t kFields = 24, kTileFields = 9;

  explicit ModelReader(const Tensor& model) {
    ffi::check_dtype(model, ffi::dtype::float64);
    ffi::check_ndim(model, 1, 1);
    ffi::check_last_dim_contiguous(model);
    const int64_t size = model.dim(0);
    if (size < kFields + kTileFields || (size - kFields) % kTileFields != 0) {
      ffi::raise("ValueError", "`model` must have %lld numbers and %lld of each tile, got %lld",
                 static_cast<long long>(kFields), static_cast<long long>(kTileFields),
                 static_cast<long long>(size));
    }
    next_ = static_cast<const double*>(model.data());
    end_ = next_ + size;
  }

  void read(KernelModel& model) {
    model.num_kv_heads = integer();
    model.group_size = integer();
    model.head_dim_vo = integer();
    model.num_sms = integer();
    model.key_bytes = integer();
    model.first_keys = *next_++;
    model.dram = *next_++;
    model.partial = *next_++;
    model.per_part = *next_++;
    model.tile_q_second = integer(0);
    model.second_speed = speed();
    model.hopper_tile_q = integer();
    model.hopper_tile_kv = integer();
    model.hopper_speed = speed();
    model.tiles.clear();
    while (next_ < end_) {
      const int64_t tile_q = integer();
      const double most_rows = *next_++, mean_rows = *next_++;
      model.tiles.push_back({tile_q, most_rows, mean_rows, speed()});
    }
  }

 private:
  int64_t integer(int64_t least = 1) {
    const double value = *next_++;
    if (!(value >= least && value <= INT32_MAX)) {
      ffi::raise("ValueError", "`model` must have counts from %lld on, got %g",
                 static_cast<long long>(least), value);
    }
    return static_cast<int64_t>(value);
  }
  KernelSpeed speed() {
    const int64_t ctas = integer();
    const double start = *next_++, per_kv_tile = *next_++, alone = *next_++, merge = *next_++;
    return {ctas, start, per_kv_tile, alone, merge, *next_++};
  }

  const double* next_;
  const double* end_;
};

void check_capacity(const PlanConfig& config, const GroupTotals& first, const GroupTotals& second) {
  const int64_t batch_size = first.batch_size + second.batch_size;
  const int64_t qo_tokens = first.qo_tokens + second.qo_tokens;
  if (max_tiles(config, batch_size, qo_tokens) > AttentionPlanner::kMaxPieces) {
    ffi::raise("ValueError",
               "%lld query tokens in %lld requests are too many for one plan, which may have at "
               "most %lld tiles",
               static_cast<long long>(qo_tokens), static_cast<long long>(batch_size),
               static_cast<long long>(AttentionPlanner::kMaxPieces));
  }
  if (!config.is_graph()) return;
  const auto check = [](const char* what, int64_t given, int64_t planned) {
    if (given > planned) {
      ffi::raise("ValueError", "the batch has %lld %s, the CUDA graph was planned for %lld",
                 static_cast<long long>(given), what, static_cast<long long>(planned));
    }
  };
  check("requests", batch_size, config.graph_batch_size);
  check("query tokens", qo_tokens, config.graph_qo_tokens);
  if (config.graph_qo_len > 0) {
    check("query tokens in one request", std::max(first.longest_qo, second.longest_qo),
          config.graph_qo_len);
  }
}

void check_workspace(const char* name, int64_t needed, int64_t given) {
  if (given >= needed) return;
  ffi::raise("ValueError", "`%s` is too small: the plan needs %lld bytes, it has %lld", name,
             static_cast<long long>(needed), static_cast<long long>(given));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(attention_plan_create, args) {
  using namespace flashinfer;
  const ffi::Tensor handle = args.tensor("handle");
  ffi::check_dtype(handle, ffi::dtype::int64);
  ffi::check_shape(handle, {1});
  *static_cast<int64_t*>(handle.data()) = reinterpret_cast<int64_t>(new Plan());
}

FLASHINFER_FFI_EXPORT(attention_plan_destroy, args) {
  using namespace flashinfer;
  delete &plan_of(args);
}

FLASHINFER_FFI_EXPORT(attention_plan_configure, args) {
  using namespace flashinfer;
  Plan& plan = plan_of(args);
  PlanConfig config = {};
  config.num_kv_heads = integer_in(args, "num_kv_heads", 1, ffi::kMaxHeads);
  config.group_size = integer_in(args, "group_size", 1, ffi::kMaxHeads);
  config.head_dim_vo = integer_in(args, "head_dim_vo", 1, 1024);
  config.tile_q = integer_in(args, "tile_q", 1, 1024);
  config.cta_slots = integer_in(args, "cta_slots", 1, 1 << 20);
  config.tile_q_second = integer_in(args, "tile_q_second", 0, 1024);
  const int64_t tile_kv = integer_in(args, "tile_kv", 1, 1024);
  while (config.tile_kv() < tile_kv) ++config.tile_kv_log2;
  if (config.tile_kv() != tile_kv) {
    ffi::raise("ValueError", "`tile_kv` must be a power of two, got %lld",
               static_cast<long long>(tile_kv));
  }
  const int64_t split = integer_in(args, "fixed_split_size", 0, INT32_MAX);
  config.disable_split_kv = args.optional_flag("disable_split_kv") == ffi::Args::Flag::kTrue;
  // What is not cut at all is cut alike in every batch: engines that want that ask for both.
  config.fixed_split_size = config.disable_split_kv ? 0 : ceil_div(split, tile_kv) * tile_kv;
  config.graph_batch_size = integer_in(args, "graph_batch_size", -1, INT32_MAX);
  config.graph_qo_tokens = integer_in(args, "graph_qo_tokens", 0, INT32_MAX);
  config.graph_qo_len = integer_in(args, "graph_qo_len", 0, INT32_MAX);
  config.lone_speed = integer_in(args, "lone_speed", 1, 64);
  config.piece_tiles = integer_in(args, "piece_tiles", 1, 64);
  config.least_rows = integer_in(args, "least_rows", 0, INT32_MAX);
  config.most_rows = integer_in(args, "most_rows", 0, INT32_MAX);
  plan.config = config;
}

FLASHINFER_FFI_EXPORT(attention_plan, args) {
  using namespace flashinfer;
  Plan& plan = plan_of(args);
  const ffi::Tensor plan_info = args.tensor("plan_info");
  const ffi::Tensor int_workspace = args.optional_tensor("int_workspace");
  const int64_t float_bytes = args.integer("float_workspace_bytes");
  ffi::check_dtype(plan_info, ffi::dtype::int64);
  ffi::check_shape(plan_info, {kInfoSize});
  const PlanConfig& config = plan.config;
  if (config.tile_q == 0) ffi::raise("ValueError", "the plan has not been configured");

  const GroupArguments first = take_group(args, plan.groups[0]);
  GroupTotals totals[2] = {read_group(first, config.group_size, plan.groups[0]), {}};
  const bool has_second = args.next_is_number();
  if (has_second) {
    const GroupArguments second = take_group(args, plan.groups[1]);
    if (config.tile_q_second == 0) {
      ffi::raise("ValueError", "a second group needs `tile_q_second` above 0, got 0");
    }
    totals[1] = read_group(second, config.group_size, plan.groups[1]);
  }
  check_capacity(config, totals[0], totals[1]);

  const PlanLayout& layout = plan.planner.plan(config, plan.groups[0],
                                               has_second ? &plan.groups[1] : nullptr, float_bytes);
  if (layout.is_too_long) {
    ffi::raise(
        "ValueError",
        "`fixed_split_size` %lld cuts this batch into more than %lld pieces, the most that a "
        "plan may have",
        static_cast<long long>(config.fixed_split_size),
        static_cast<long long>(AttentionPlanner::kMaxPieces));
  }
  if (float_bytes >= 0) {
    check_workspace("float_workspace_buffer", layout.float_bytes, float_bytes);
  }
  if (int_workspace) {
    ffi::check_ndim(int_workspace, 1, 1);
    ffi::check_last_dim_contiguous(int_workspace);
    const int64_t given = int_workspace.numel() * int_workspace.itemsize();
    check_workspace("int_workspace_buffer", layout.int_bytes, given);
    if (!ffi::is_aligned(int_workspace, 16)) {
      ffi::raise("ValueError", "`int_workspace_buffer` must start at a multiple of 16 bytes");
    }
    if (int_workspace.dl->device.device_type == kDLCPU) {
      plan.planner.write(int_workspace.data());
    } else {
      ffi::check_cuda(int_workspace);
      plan.staging.copy(int_workspace, layout.used_bytes,
                        [&](void* staged) { plan.planner.write(staged); });
    }
  }
  const int64_t info[kInfoSize] = {layout.num_ctas,      layout.num_merges,    layout.rows_per_slot,
                                   layout.items_offset,  layout.merges_offset, layout.num_slots,
                                   layout.int_bytes,     layout.float_bytes,   totals[0].qo_tokens,
                                   totals[0].batch_size, totals[0].kv_entries, config.tile_q,
                                   totals[1].qo_tokens,  totals[1].batch_size, totals[1].kv_entries,
                                   layout.sums_offset,   layout.merged_rows};
  std::copy(info, info + kInfoSize, static_cast<int64_t*>(plan_info.data()));
}

FLASHINFER_FFI_EXPORT(attention_choose, args) {
  using namespace flashinfer;
  const ffi::Tensor choice = args.tensor("choice");
  ffi::check_dtype(choice, ffi::dtype::float64);
  ffi::check_shape(choice, {5});
  thread_local KernelModel model;
  thread_local RequestGroup group;  // not freed, as a plan's scratch is not
  ModelReader(args.tensor("model")).read(model);
  const GroupArguments arguments = take_group(args, group);
  read_group(arguments, model.group_size, group);
  const KernelChoice found = KernelChooser(model, group).choose();
  double* values = static_cast<double*>(choice.data());
  values[0] = static_cast<double>(found.tile_q);
  values[1] = found.portable_us;
  values[2] = found.hopper_us;
  values[3] = found.apart_us;
  values[4] = static_cast<double>(found.few_rows);
}
