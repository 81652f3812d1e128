//   attention_device_plan(layout, config, int_workspace, qo_indptr, kv_indptr, kv_len,
//                         last_page_len, page_size, qo_len, causal, window_left)
//
// Writes the work list of a plan from lengths on the GPU. `layout` holds the bytes of a PlanLayout
// that a planner made for a CUDA graph from bounds of the lengths, and `config` the bytes of that
// planner's PlanConfig. The index tensors are int32 vectors on the device of int_workspace. Without
// qo_indptr each request has qo_len query tokens, which else bounds them. Without kv_indptr the
// requests have equal shares of the page numbers. Either kv_len or last_page_len may be None.
#include <flashinfer/attention/kv_tiles.h>
#include <flashinfer/scheduler/attention_tiles.h>

#include "attention_device_plan.h"
#include "ffi.h"
#include "struct_tensor.h"

namespace flashinfer {
namespace {

// Tiles whose numbers and positions fit in shared memory without a raised limit.
constexpr int64_t kMaxTiles = 5888;

const int32_t* vector_data(const ffi::Tensor& tensor, int64_t length,
                           const ffi::Tensor& workspace) {
  if (!tensor) return nullptr;
  ffi::check_dtype(tensor, ffi::dtype::int32);
  ffi::check_shape(tensor, {length});
  ffi::check_contiguous(tensor);
  ffi::check_same_device(tensor, workspace);
  return static_cast<const int32_t*>(tensor.data());
}

void check_size(const DevicePlanParams& params) {
  const int64_t per_request =
      ceil_div(int64_t{params.qo_len} * params.group_size, int64_t{params.tile_q});
  if (params.batch_size * per_request > kMaxTiles) {
    ffi::raise("ValueError",
               "lengths on the GPU are planned for at most %lld tiles of %d rows of queries, got "
               "%d requests of up to %lld tiles",
               static_cast<long long>(kMaxTiles), params.tile_q, params.batch_size,
               static_cast<long long>(per_request));
  }
  const int64_t requests = params.kv_indptr == nullptr ? params.batch_size : 1;
  const int64_t entries =
      params.kv_indptr == nullptr ? params.pages_per_request : params.kv_entries;
  const int64_t kv_tiles = ceil_div(entries * params.page_size, int64_t{kTileKV}) + 1;
  if (kv_tiles * requests * per_request > INT32_MAX / 2) {
    ffi::raise("ValueError",
               "lengths on the GPU are planned for at most 2^30 pairs of tiles, got %d requests "
               "and %d pages of %d tokens",
               params.batch_size, params.kv_entries, params.page_size);
  }
}

void run(ffi::Args& args) {
  const PlanLayout& layout = exact_struct_in<PlanLayout>(args.tensor("layout"));
  const PlanConfig& config = exact_struct_in<PlanConfig>(args.tensor("config"));
  const ffi::Tensor workspace = args.tensor("int_workspace_buffer");
  const ffi::Tensor qo_indptr = args.optional_tensor("qo_indptr");
  const ffi::Tensor kv_indptr = args.optional_tensor("kv_indptr");
  const ffi::Tensor kv_len = args.optional_tensor("kv_len");
  const ffi::Tensor last_page_len = args.optional_tensor("last_page_len");
  DevicePlanParams params = {};
  params.page_size = static_cast<int32_t>(args.integer_in("page_size", 1, INT32_MAX));
  params.qo_len = static_cast<int32_t>(args.integer_in("qo_len", 0, INT32_MAX));
  params.causal = args.flag("causal");
  params.window_left = static_cast<int32_t>(args.integer_in("window_left", -1, INT32_MAX));
  args.all_taken();

  ffi::check_ndim(workspace, 1, 1);
  ffi::check_contiguous(workspace);
  const int64_t given = workspace.numel() * workspace.itemsize();
  if (given < layout.int_bytes) {
    ffi::raise("ValueError", "`%s` is too small: the plan needs %lld bytes, it has %lld",
               workspace.name, static_cast<long long>(layout.int_bytes),
               static_cast<long long>(given));
  }
  ffi::check_cuda(workspace);
  const PlannedGroup& group = layout.groups[0];
  params.batch_size = static_cast<int32_t>(group.batch_size);
  params.qo_tokens = static_cast<int32_t>(group.qo_tokens);
  params.kv_entries = static_cast<int32_t>(group.kv_entries);
  params.qo_indptr = vector_data(qo_indptr, group.batch_size + 1, workspace);
  params.kv_indptr = vector_data(kv_indptr, group.batch_size + 1, workspace);
  params.kv_len = vector_data(kv_len, group.batch_size, workspace);
  params.last_page_len = vector_data(last_page_len, group.batch_size, workspace);
  if (!kv_len && !last_page_len) {
    ffi::raise("ValueError", "`kv_len` or `last_page_len` must be given");
  }
  params.group_size = static_cast<int32_t>(config.group_size);
  params.tile_q = static_cast<int32_t>(config.tile_q);
  params.num_columns = static_cast<int32_t>(layout.num_ctas);
  params.num_merges = static_cast<int32_t>(layout.num_merges);
  if (params.batch_size == 0 || params.qo_len == 0 || params.num_columns == 0) return;
  params.pages_per_request = params.kv_entries / params.batch_size;
  check_size(params);
  char* const bytes = static_cast<char*>(workspace.data());
  params.items = reinterpret_cast<WorkItem*>(bytes + layout.items_offset);
  params.merges = reinterpret_cast<MergeItem*>(bytes + layout.merges_offset);
  const ffi::DeviceGuard guard(workspace);
  ffi::check_launch(device_plan(params, ffi::current_stream(workspace)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(attention_device_plan, args) { flashinfer::run(args); }
