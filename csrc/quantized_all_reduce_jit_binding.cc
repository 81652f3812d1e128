//   quantized_all_reduce(workspace, input, output, enable_pdl)
//
// `workspace` has the bytes of a CommWorkspace of flashinfer/comm/workspace.h, a CPU tensor.
#include "quantized_all_reduce.h"
#include "comm_binding.h"

FLASHINFER_FFI_EXPORT(quantized_all_reduce, args) {
  using namespace flashinfer;
  constexpr int64_t kRanks = FLASHINFER_CFG_WORLD_SIZE, kGroup = FLASHINFER_CFG_GROUP_SIZE;
  QuantizedAllReduceParams params = {};
  const ffi::Tensor workspace = args.tensor("workspace");
  const ffi::Tensor input = args.tensor("inp");
  const ffi::Tensor output = args.tensor("output");
  const ffi::Args::Flag pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  params.workspace = workspace_of(workspace, FLASHINFER_CFG_WORLD_SIZE);
  for (const ffi::Tensor* tensor : {&input, &output}) {
    ffi::check_dtype(*tensor, ffi::dtype::FLASHINFER_CFG_DTYPE);
    ffi::check_contiguous(*tensor);
    if (tensor->numel() % 16 != 0 || !ffi::is_aligned(*tensor, 16)) {
      ffi::raise("ValueError",
                 "`%s` must begin on 16 bytes and have a multiple of 16 elements, got shape %s",
                 tensor->name, tensor->shape_text().c_str());
    }
  }
  ffi::check_same_shape(output, input);
  ffi::check_cuda(input);
  ffi::check_same_device(output, input);
  ffi::check_same_view_or_disjoint(output, input);
  params.input = input.data();
  params.output = output.data();
  params.num_elements = input.numel();
  const int64_t groups = (input.numel() + kGroup - 1) / kGroup;
  const int64_t owned = (groups + kRanks - 1) / kRanks, places = 2 * kRanks * owned;
  params.scales_offset = places * kGroup;
  if (params.scales_offset + 4 * places > params.workspace.half_bytes || owned > INT32_MAX) {
    ffi::raise("ValueError", "`inp` is too large for the workspace, got shape %s",
               input.shape_text().c_str());
  }
  params.owned_groups = static_cast<uint32_t>(owned);
  if (owned == 0) return;
  const ffi::DeviceGuard guard(input);
  ffi::check_launch(
      quantized_all_reduce(params, ffi::resolve_pdl(pdl, input), ffi::current_stream(input)));
}
