//   attention_device_plan(layout, config, int_workspace, qo_indptr, kv_indptr, kv_len,
//                         last_page_len, page_size, qo_len, causal, window_left)
//
// Writes the work list of a plan from lengths on the GPU. `layout` holds the bytes of a PlanLayout
// that a planner made for a CUDA graph from bounds of the lengths, and `config` the bytes of that
// planner's PlanConfig. The index tensors are int32 vectors on the device of int_workspace. Without
// qo_indptr each request has qo_len query tokens, which else bounds them. Without kv_indptr the
// requests have equal shares of the page numbers. Either kv_len or last_page_len may be None.
#include "attention_device_plan.h"
#include "device_plan_binding.h"

namespace flashinfer {
namespace {

void run(ffi::Args& args) {
  PlanLayout& layout = exact_struct_in<PlanLayout>(args.tensor("layout"));
  const PlanConfig& config = exact_struct_in<PlanConfig>(args.tensor("config"));
  const ffi::Tensor workspace = args.tensor("int_workspace_buffer");
  ffi::check_ndim(workspace, 1, 1);
  ffi::check_contiguous(workspace);
  const int64_t given = workspace.numel() * workspace.itemsize();
  if (given < layout.int_bytes) {
    ffi::raise("ValueError", "`%s` is too small: the plan needs %lld bytes, it has %lld",
               workspace.name, static_cast<long long>(layout.int_bytes),
               static_cast<long long>(given));
  }
  ffi::check_cuda(workspace);
  layout.counters_offset = -1;  // the kernel writes none
  DevicePlanParams params = read_device_plan(args, layout, config, workspace);
  if (params.batch_size == 0) return;
  char* const bytes = static_cast<char*>(workspace.data());
  params.items = reinterpret_cast<WorkItem*>(bytes + layout.items_offset);
  params.merges = reinterpret_cast<MergeItem*>(bytes + layout.merges_offset);
  const ffi::DeviceGuard guard(workspace);
  ffi::check_launch(device_plan(params, ffi::current_stream(workspace)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(attention_device_plan, args) { flashinfer::run(args); }
