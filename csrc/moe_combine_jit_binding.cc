//   moe_combine(output, rows, entry_row, token_final_scales, starts_early, enable_pdl)
// starts_early: the previous kernel writes only rows, and the one before it has finished.
#include "ffi.h"
#include "moe_combine.h"

#include <algorithm>

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr DLDataType kDtypeOut = ffi::dtype::FLASHINFER_CFG_DTYPE_OUT;
constexpr int64_t kMultiple = 8;

// Rows that 16 bytes at a time can be read from or written to.
void check_rows(const ffi::Tensor& tensor, DLDataType dtype) {
  ffi::check_dtype(tensor, dtype);
  ffi::check_ndim(tensor, 2, 2);
  ffi::check_last_dim_contiguous(tensor);
  const int64_t element = dtype.bits / 8;
  const bool aligned = ffi::is_aligned(tensor, 16) && tensor.dim(1) % kMultiple == 0 &&
                       (tensor.dim(0) <= 1 || tensor.stride(0) * element % 16 == 0);
  if (!aligned || tensor.dim(1) > INT32_MAX) {
    ffi::raise("ValueError",
               "`%s` must have a multiple of %lld columns and rows that begin at multiples of 16 "
               "bytes, got shape %s with strides %s",
               tensor.name, static_cast<long long>(kMultiple), tensor.shape_text().c_str(),
               ffi::list_text(tensor.dl->strides, tensor.ndim()).c_str());
  }
}

void run(ffi::Args& args) {
  const ffi::Tensor out = args.tensor("output"), rows = args.tensor("rows");
  const ffi::Tensor entry_row = args.tensor("entry_row");
  const ffi::Tensor weights = args.tensor("token_final_scales");
  const bool starts_early = args.flag("starts_early");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  check_rows(rows, kDtype);
  check_rows(out, kDtypeOut);
  ffi::check_shape(out, {entry_row.dim(0), rows.dim(1)});
  ffi::check_no_broadcast(out);
  ffi::check_dtype(entry_row, ffi::dtype::int32);
  ffi::check_ndim(entry_row, 2, 2);
  ffi::check_contiguous(entry_row);
  ffi::check_dtype(weights, ffi::dtype::float32);
  ffi::check_same_shape(weights, entry_row);
  ffi::check_contiguous(weights);
  for (const ffi::Tensor& tensor : {rows, entry_row, weights}) ffi::check_disjoint(out, tensor);
  ffi::check_cuda(rows);
  for (const ffi::Tensor& tensor : {out, entry_row, weights}) {
    ffi::check_same_device(tensor, rows);
  }
  if (out.numel() == 0) return;

  MoeCombineParams params = {};
  params.rows = rows.data();
  params.rows_stride = rows.stride(0);
  params.entry_row = static_cast<const int32_t*>(entry_row.data());
  params.weights = static_cast<const float*>(weights.data());
  params.out = out.data();
  params.out_stride = out.stride(0);
  params.num_rows = static_cast<uint32_t>(std::min<int64_t>(rows.dim(0), INT32_MAX));
  params.num_tokens = static_cast<uint32_t>(out.dim(0));
  params.top_k = static_cast<uint32_t>(entry_row.dim(1));
  params.hidden = static_cast<uint32_t>(out.dim(1));
  params.starts_early = starts_early;
  const ffi::DeviceGuard guard(rows);
  ffi::check_launch(
      moe_combine(params, ffi::resolve_pdl(enable_pdl, rows), ffi::current_stream(rows)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(moe_combine, args) { flashinfer::run(args); }
