//   attention_kv_tile()
//   attention_hopper_kv_tile(query_bytes, widens, tile_q, head_dim_qk, head_dim_vo)
//   attention_planner_size()
//   attention_plan_layout_size()
//   attention_plan_create(planner, layout)
//   attention_plan_destroy(planner)
//   attention_plan_configure(planner, config)
//   attention_plan_second(planner, argument_names, qo_indptr, kv_indptr, kv_len, last_page_len,
//                         page_size, tokens_per_request, causal, window_left)
//   attention_plan_visible(planner, visible)
//   attention_plan(planner, int_workspace, float_workspace_bytes, argument_names, qo_indptr,
//                  kv_indptr, kv_len, last_page_len, page_size, tokens_per_request, causal,
//                  window_left)
//   attention_plan_float_bytes(planner)
//   attention_plan_int_bytes(planner)
//   attention_estimate(estimate, model, argument_names, qo_indptr, kv_indptr, kv_len, last_page_len,
//                      page_size, tokens_per_request, causal, window_left)
//
// The first two return the tokens by which plans for the portable and for the Hopper kernel cut
// keys. `planner` holds the bytes of a planner, attention_planner_size() of them. `create` makes
// one and writes its plans to `layout`, the bytes of a PlanLayout, attention_plan_layout_size() of
// them, which must live as long as the planner. `config`, `model` and `estimate` hold the bytes of
// a PlanConfig, a KernelModel and a KernelEstimate; the last is written. The next plan also takes
// the requests of `second`, which have separate tensors, and keeps tiles of its own requests to
// `visible`, [query tokens, 2] int32: the first key that each query sees, and the one after the
// last. The `_bytes` functions describe the latest plan.
//
// A CUDA int_workspace is filled by one asynchronous copy on the current stream, and a CPU tensor
// in place; with None, only the layout is made. A negative float_workspace_bytes is not checked.
// argument_names is a position in kArgumentNames. With page_size 0, keys are ragged. If qo_indptr
// is None, every request has tokens_per_request tokens. kv_len and last_page_len may be None. All
// index tensors are on the host.
#include <flashinfer/attention/kv_tiles.h>
#include <flashinfer/scheduler/attention_choice.h>
#include <flashinfer/scheduler/attention_plan.h>

#include <new>
#include <vector>

#include "attention_requests.h"
#include "plan_staging.h"
#include "struct_tensor.h"

namespace flashinfer {
namespace {

struct Planner {
  static constexpr uint64_t kTag = 0x706c616e'6e657221u;

  uint64_t tag = kTag;  // bytes that are not a planner have a different tag
  PlanLayout* layout;
  PlanConfig config = {};
  RequestGroup groups[2];
  int64_t longest_second = 0;  // query tokens of a request of groups[1]
  bool has_second = false;
  std::vector<VisibleRange> visible;  // of the query tokens of groups[0]
  bool has_visible = false;
  AttentionPlanner planner;
  StagingRing staging;
};

Planner& planner_of(ffi::Args& args) {
  Planner& planner = struct_in<Planner>(args.tensor("planner"));
  if (planner.tag != Planner::kTag) {
    ffi::raise("RuntimeError", "attention_plan_create() comes first");
  }
  return planner;
}

Planner& configured_planner_of(ffi::Args& args) {
  Planner& planner = planner_of(args);
  if (planner.config.tile_q == 0) {
    ffi::raise("RuntimeError", "attention_plan_configure() comes first");
  }
  return planner;
}

void check_in(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  ffi::raise("ValueError", "`%s` must be from %lld to %lld, got %lld", name,
             static_cast<long long>(low), static_cast<long long>(high),
             static_cast<long long>(value));
}

void check_config(const PlanConfig& config) {
  check_in("num_kv_heads", config.num_kv_heads, 1, ffi::kMaxHeads);
  check_in("group_size", config.group_size, 1, ffi::kMaxHeads);
  check_in("head_dim_vo", config.head_dim_vo, 1, 1024);
  check_in("tile_q", config.tile_q, 1, 1024);
  check_in("tile_q_second", config.tile_q_second, 0, 1024);
  check_in("tile_kv", config.tile_kv, 1, 1024);
  check_in("piece_tiles", config.piece_tiles, 1, 64);
  check_in("cta_slots", config.cta_slots, 1, 1 << 20);
  check_in("lone_speed", config.lone_speed, 1, 64);
  check_in("fixed_split_size", config.fixed_split_size, 0, INT32_MAX);
  check_in("disable_split_kv", config.disable_split_kv, 0, 1);
  check_in("graph_batch_size", config.graph_batch_size, -1, INT32_MAX);
  check_in("graph_qo_tokens", config.graph_qo_tokens, 0, INT32_MAX);
  check_in("graph_qo_len", config.graph_qo_len, 0, INT32_MAX);
  check_in("least_rows", config.least_rows, 0, INT32_MAX);
  check_in("most_rows", config.most_rows, 0, INT32_MAX);
  if ((config.tile_kv & (config.tile_kv - 1)) != 0) {
    ffi::raise("ValueError", "`tile_kv` must be a power of two, got %lld",
               static_cast<long long>(config.tile_kv));
  }
}

void check_model(const KernelModel& model) {
  check_in("num_kv_heads", model.num_kv_heads, 1, INT32_MAX);
  check_in("group_size", model.group_size, 1, INT32_MAX);
  check_in("head_dim_vo", model.head_dim_vo, 1, INT32_MAX);
  check_in("num_sms", model.num_sms, 1, INT32_MAX);
  check_in("key_bytes", model.key_bytes, 1, INT32_MAX);
  check_in("tile_q_second", model.tile_q_second, 0, INT32_MAX);
  check_in("portable_tile_kv", model.portable_tile_kv, 1, INT32_MAX);
  check_in("hopper_tile_q", model.hopper_tile_q, 1, INT32_MAX);
  check_in("hopper_tile_kv", model.hopper_tile_kv, 1, INT32_MAX);
  check_in("hopper_speed.ctas", model.hopper_speed.ctas, 1, INT32_MAX);
  check_in("num_tiles", model.num_tiles, 1, std::size(model.tiles));
  for (int64_t i = 0; i < model.num_tiles; ++i) {
    check_in("tiles.tile_q", model.tiles[i].tile_q, 1, INT32_MAX);
    check_in("tiles.speed.ctas", model.tiles[i].speed.ctas, 1, INT32_MAX);
    check_in("tiles.both.ctas", model.tiles[i].both.ctas, 1, INT32_MAX);
  }
}

void check_capacity(const PlanConfig& config, const PlannedGroup& first, const PlannedGroup& second,
                    int64_t longest_qo) {
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
    check("query tokens in one request", longest_qo, config.graph_qo_len);
  }
}

void check_workspace(const char* name, int64_t needed, int64_t given) {
  if (given >= needed) return;
  ffi::raise("ValueError", "`%s` is too small: the plan needs %lld bytes, it has %lld", name,
             static_cast<long long>(needed), static_cast<long long>(given));
}

const VisibleRange* visible_of(const RequestGroup& group,
                               const std::vector<VisibleRange>& visible) {
  const int64_t given = static_cast<int64_t>(visible.size());
  if (given != group.qo_tokens) {
    ffi::raise("ValueError", "`visible` must have %lld rows for this batch, got %lld",
               static_cast<long long>(group.qo_tokens), static_cast<long long>(given));
  }
  return visible.data();
}

// Writes the work list to its destination.
void write_plan(Planner& planner, const Tensor& workspace) {
  const PlanLayout& layout = planner.planner.layout();
  ffi::check_ndim(workspace, 1, 1);
  ffi::check_last_dim_contiguous(workspace);
  const int64_t given = workspace.numel() * workspace.itemsize();
  check_workspace("int_workspace_buffer", layout.int_bytes, given);
  if (!ffi::is_aligned(workspace, 16)) {
    ffi::raise("ValueError", "`int_workspace_buffer` must start at a multiple of 16 bytes");
  }
  if (workspace.dl->device.device_type == kDLCPU) {
    planner.planner.write(workspace.data());
    return;
  }
  ffi::check_cuda(workspace);
  planner.staging.copy(workspace, layout.used_bytes,
                       [&](void* staged) { planner.planner.write(staged); });
}

}  // namespace
}  // namespace flashinfer

using namespace flashinfer;

FLASHINFER_FFI_EXPORT_INT(attention_kv_tile, args) {
  args.all_taken();
  return kTileKV;
}

FLASHINFER_FFI_EXPORT_INT(attention_hopper_kv_tile, args) {
  const bool is_8_bit = args.integer_in("query_bytes", 1, 2) == 1;
  const bool widens = args.flag("widens");
  const int consumers = static_cast<int>(args.integer_in("tile_q", 64, 192)) / 64;
  const int head_dim_qk = static_cast<int>(args.integer_in("head_dim_qk", 1, 256));
  const int head_dim_vo = static_cast<int>(args.integer_in("head_dim_vo", 1, 256));
  const OperandForm form = is_8_bit ? OperandForm::k8Bit
                           : widens ? OperandForm::kWidened
                                    : OperandForm::k16Bit;
  return hopper_plan_tile(form, consumers, head_dim_qk, head_dim_vo);
}

FLASHINFER_FFI_EXPORT_INT(attention_planner_size, args) {
  args.all_taken();
  return sizeof(Planner);
}

FLASHINFER_FFI_EXPORT_INT(attention_plan_layout_size, args) {
  args.all_taken();
  return sizeof(PlanLayout);
}

FLASHINFER_FFI_EXPORT(attention_plan_create, args) {
  const Tensor bytes = args.tensor("planner");
  struct_in<Planner>(bytes);
  PlanLayout& layout = exact_struct_in<PlanLayout>(args.tensor("layout"));
  args.all_taken();
  (new (bytes.data()) Planner())->layout = &layout;
}

FLASHINFER_FFI_EXPORT(attention_plan_destroy, args) {
  Planner& planner = planner_of(args);
  args.all_taken();
  planner.tag = 0;
  planner.~Planner();
}

FLASHINFER_FFI_EXPORT(attention_plan_configure, args) {
  Planner& planner = planner_of(args);
  PlanConfig config = exact_struct_in<PlanConfig>(args.tensor("config"));
  args.all_taken();
  check_config(config);
  // Without splitting, the result does not depend on the batch: engines that need that set both
  // options.
  config.fixed_split_size =
      config.disable_split_kv ? 0
                              : ceil_div(config.fixed_split_size, config.tile_kv) * config.tile_kv;
  planner.config = config;
}

FLASHINFER_FFI_EXPORT(attention_plan_second, args) {
  Planner& planner = configured_planner_of(args);
  planner.has_second = false;
  if (planner.config.tile_q_second == 0) {
    ffi::raise("ValueError", "a second group needs `tile_q_second` above 0, got 0");
  }
  planner.longest_second = read_requests(args, planner.config.group_size, planner.groups[1]);
  planner.has_second = true;
}

FLASHINFER_FFI_EXPORT(attention_plan_visible, args) {
  Planner& planner = configured_planner_of(args);
  const Tensor visible = args.tensor("visible");
  args.all_taken();
  ffi::check_ndim(visible, 2, 2);
  ffi::check_shape(visible, {visible.dim(0), 2});
  ffi::check_contiguous(visible);
  ffi::check_dtype(visible, ffi::dtype::int32);
  if (visible.dl->device.device_type != kDLCPU) {
    ffi::raise("ValueError", "`visible` must be on the host");
  }
  const VisibleRange* const ranges = static_cast<const VisibleRange*>(visible.data());
  planner.visible.assign(ranges, ranges + visible.dim(0));
  planner.has_visible = true;
}

FLASHINFER_FFI_EXPORT(attention_plan, args) {
  Planner& planner = configured_planner_of(args);
  const Tensor int_workspace = args.optional_tensor("int_workspace");
  const int64_t float_bytes = args.integer("float_workspace_bytes");
  const PlanConfig& config = planner.config;
  const RequestGroup* second = planner.has_second ? &planner.groups[1] : nullptr;
  planner.has_second = false;  // reset even if planning fails

  const bool has_visible = planner.has_visible;
  planner.has_visible = false;

  RequestGroup& first = planner.groups[0];
  int64_t longest = read_requests(args, config.group_size, first);
  first.visible = has_visible ? visible_of(first, planner.visible) : nullptr;
  if (second) longest = std::max(longest, planner.longest_second);
  check_capacity(config, first.planned(), second ? second->planned() : PlannedGroup{}, longest);
  if (!planner.planner.plan(config, first, second, float_bytes)) {
    ffi::raise(
        "ValueError",
        "`fixed_split_size` %lld cuts this batch into more than %lld pieces, the most that a "
        "plan may have",
        static_cast<long long>(config.fixed_split_size),
        static_cast<long long>(AttentionPlanner::kMaxPieces));
  }
  const PlanLayout& layout = planner.planner.layout();
  if (float_bytes >= 0) {
    check_workspace("float_workspace_buffer", layout.float_bytes, float_bytes);
  }
  if (int_workspace) write_plan(planner, int_workspace);
  *planner.layout = layout;
}

FLASHINFER_FFI_EXPORT_INT(attention_plan_float_bytes, args) {
  return planner_of(args).layout->float_bytes;
}

FLASHINFER_FFI_EXPORT_INT(attention_plan_int_bytes, args) {
  return planner_of(args).layout->int_bytes;
}

FLASHINFER_FFI_EXPORT(attention_estimate, args) {
  KernelEstimate& estimate = exact_struct_in<KernelEstimate>(args.tensor("estimate"));
  const KernelModel& model = exact_struct_in<KernelModel>(args.tensor("model"));
  check_model(model);
  thread_local RequestGroup group;  // kept, like a planner's scratch memory
  read_requests(args, model.group_size, group);
  estimate = KernelEstimator(model, group).estimate();
}
