//   moe_map(offsets, row_token, entry_row, token_selected_experts, first_expert, enable_pdl)
#include "ffi.h"
#include "moe_map.h"

namespace flashinfer {
namespace {

enum class Index { int32, int64 };
constexpr DLDataType kIndexDtype =
    Index::FLASHINFER_CFG_INDEX == Index::int64 ? ffi::dtype::int64 : ffi::dtype::int32;

void run(ffi::Args& args) {
  const ffi::Tensor offsets = args.tensor("offsets"), row_token = args.tensor("row_token");
  const ffi::Tensor entry_row = args.tensor("entry_row");
  const ffi::Tensor experts = args.tensor("token_selected_experts");
  const int64_t first_expert = args.integer_in("first_expert", 0, INT32_MAX);
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  ffi::check_dtype(experts, kIndexDtype);
  ffi::check_ndim(experts, 2, 2);
  ffi::check_contiguous(experts);
  if (experts.numel() > INT32_MAX || experts.dim(1) == 0) {
    ffi::raise("ValueError", "`%s` must have at least 1 column and less than 2^31 elements, got %s",
               experts.name, experts.shape_text().c_str());
  }
  for (const ffi::Tensor* tensor : {&offsets, &row_token, &entry_row}) {
    ffi::check_dtype(*tensor, ffi::dtype::int32);
    ffi::check_contiguous(*tensor);
    ffi::check_disjoint(*tensor, experts);
  }
  ffi::check_shape(row_token, {experts.numel()});
  ffi::check_same_shape(entry_row, experts);
  ffi::check_ndim(offsets, 1, 1);
  if (offsets.dim(0) < 2 || offsets.dim(0) > kMoeMaxExperts + 1) {
    ffi::raise("ValueError", "`%s` must have 2 to %d elements, got shape %s", offsets.name,
               kMoeMaxExperts + 1, offsets.shape_text().c_str());
  }
  ffi::check_disjoint(offsets, row_token);
  ffi::check_disjoint(offsets, entry_row);
  ffi::check_disjoint(row_token, entry_row);
  ffi::check_cuda(experts);
  for (const ffi::Tensor& tensor : {offsets, row_token, entry_row}) {
    ffi::check_same_device(tensor, experts);
  }

  MoeMapParams params = {};
  params.experts = experts.data();
  params.num_entries = static_cast<uint32_t>(experts.numel());
  params.top_k = static_cast<uint32_t>(experts.dim(1));
  params.first_expert = first_expert;
  params.num_experts = static_cast<uint32_t>(offsets.dim(0) - 1);
  params.offsets = static_cast<int32_t*>(offsets.data());
  params.row_token = static_cast<int32_t*>(row_token.data());
  params.entry_row = static_cast<int32_t*>(entry_row.data());
  const ffi::DeviceGuard guard(experts);
  ffi::check_launch(
      moe_map(params, ffi::resolve_pdl(enable_pdl, experts), ffi::current_stream(experts)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(moe_map, args) { flashinfer::run(args); }
