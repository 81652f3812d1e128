//   attention_mask_ranges(ranges, mask, mask_indptr, qo_indptr, kv_len)
//
// Writes the first key that each query sees, and the one after the last: [num_queries, 2] int32.
// The values of the index tensors, int32 on the device of `mask`, are the caller's to check.
#include "attention_mask_ranges.h"
#include "ffi.h"

namespace flashinfer {
namespace {

const int32_t* index_data(const ffi::Tensor& tensor, int64_t length, const ffi::Tensor& mask) {
  ffi::check_dtype(tensor, ffi::dtype::int32);
  ffi::check_shape(tensor, {length});
  ffi::check_contiguous(tensor);
  ffi::check_same_device(tensor, mask);
  return static_cast<const int32_t*>(tensor.data());
}

void run(ffi::Args& args) {
  const ffi::Tensor ranges = args.tensor("ranges"), mask = args.tensor("mask");
  const ffi::Tensor mask_indptr = args.tensor("mask_indptr");
  const ffi::Tensor qo_indptr = args.tensor("qo_indptr"), kv_len = args.tensor("kv_len");
  args.all_taken();

  ffi::check_dtype(mask, ffi::dtype::uint8);
  ffi::check_ndim(mask, 1, 1);
  ffi::check_contiguous(mask);
  ffi::check_dtype(ranges, ffi::dtype::int32);
  ffi::check_ndim(ranges, 2, 2);
  ffi::check_shape(ranges, {ranges.dim(0), 2});
  ffi::check_contiguous(ranges);
  ffi::check_ndim(kv_len, 1, 1);
  ffi::check_cuda(mask);
  ffi::check_same_device(ranges, mask);

  MaskRangesParams params = {};
  params.mask = static_cast<const uint8_t*>(mask.data());
  const int64_t batch_size = kv_len.dim(0);
  params.kv_len = index_data(kv_len, batch_size, mask);
  params.mask_indptr = index_data(mask_indptr, batch_size + 1, mask);
  params.qo_indptr = index_data(qo_indptr, batch_size + 1, mask);
  params.ranges = static_cast<VisibleRange*>(ranges.data());
  params.batch_size = static_cast<int32_t>(batch_size);
  params.num_queries = static_cast<int32_t>(ranges.dim(0));
  if (params.num_queries == 0 || params.batch_size == 0) return;
  const ffi::DeviceGuard guard(mask);
  ffi::check_launch(mask_ranges(params, ffi::current_stream(mask)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(attention_mask_ranges, args) { flashinfer::run(args); }
