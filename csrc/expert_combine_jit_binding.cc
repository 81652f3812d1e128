//   expert_combine(workspace, outputs, combined, active, places, enable_pdl)
//     outputs   [ranks, max_tokens, hidden]: what the experts here made of received tokens
//     combined  [tokens, hidden]
//     active    ranks that take part: a number with a bit for each, or int64 [1] on the device
//     places    (is_in_workspace, slots, places): outputs lie in the buffer at `places`; offsets in
//               bytes
//
// `workspace` has the bytes of a CommWorkspace of flashinfer/comm/workspace.h, a CPU tensor. Python
// checks that everything fits the buffer.
#include "expert_combine.h"
#include "expert_binding.h"

FLASHINFER_FFI_EXPORT(expert_combine, args) {
  using namespace flashinfer;
  ExpertCombineParams params = {};
  const ffi::Tensor workspace = args.tensor("workspace");
  const ffi::Tensor outputs = args.tensor("payload");
  const ffi::Tensor combined = args.tensor("output");
  params.active = take_active_ranks(args, outputs);
  ffi::Args places = args.group("places", 3);
  const ffi::Args::Flag pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  params.workspace = workspace_of(workspace, FLASHINFER_CFG_WORLD_SIZE);
  ffi::check_dtype(outputs, ffi::dtype::FLASHINFER_CFG_DTYPE);
  ffi::check_ndim(outputs, 3, 3);
  const int64_t max_tokens = outputs.dim(1), hidden = outputs.dim(2);
  ffi::check_shape(outputs, {FLASHINFER_CFG_WORLD_SIZE, max_tokens, hidden});
  ffi::check_contiguous(outputs);
  ffi::check_cuda(outputs);
  ffi::check_dtype(combined, ffi::dtype::FLASHINFER_CFG_DTYPE_OUT);
  ffi::check_ndim(combined, 2, 2);
  ffi::check_shape(combined, {combined.dim(0), hidden});
  ffi::check_contiguous(combined);
  ffi::check_same_device(combined, outputs);
  ffi::check_disjoint(combined, outputs);
  for (const ffi::Tensor* tensor : {&outputs, &combined}) {
    if (hidden % 8 != 0 || !ffi::is_aligned(*tensor, 8 * tensor->itemsize() < 16 ? 8 : 16)) {
      ffi::raise("ValueError", "`%s` must begin on 16 bytes and have rows of whole 8 elements",
                 tensor->name);
    }
  }
  const bool is_in_workspace = places.flag("payload_in_workspace");
  params.slots = places.integer("slots");
  params.places = places.integer("places");
  params.outputs = is_in_workspace ? nullptr : outputs.data();
  params.combined = combined.data();
  params.num_tokens = static_cast<uint32_t>(combined.dim(0));
  params.max_tokens = static_cast<uint32_t>(max_tokens);
  params.row_vecs = static_cast<uint32_t>(hidden / 8);
  const ffi::DeviceGuard guard(outputs);
  ffi::check_launch(
      expert_combine(params, ffi::resolve_pdl(pdl, outputs), ffi::current_stream(outputs)));
}
