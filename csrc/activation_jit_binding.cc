//   act_and_mul(out, input, enable_pdl)
#include "activation.h"
#include "ffi.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;

void run(ffi::Args& args) {
  const ffi::Tensor out = args.tensor("out");
  const ffi::Tensor input = args.tensor("input");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();

  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 1, 8);
  if (input.dim(-1) % 2 != 0) {
    ffi::raise("ValueError", "`input` must have an even last dimension (gate and up), got shape %s",
               input.shape_text().c_str());
  }
  const int64_t hidden_size = input.dim(-1) / 2;
  ffi::check_dtype(out, kDtype);
  bool shape_fits = out.ndim() == input.ndim() && out.dim(-1) == hidden_size;
  for (int i = 0; shape_fits && i < input.ndim() - 1; ++i) shape_fits = out.dim(i) == input.dim(i);
  if (!shape_fits) {
    ffi::raise("ValueError",
               "`out` must have the shape of `input` %s with the last dimension halved, got %s",
               input.shape_text().c_str(), out.shape_text().c_str());
  }
  const int64_t num_rows = input.dim(-1) == 0 ? 0 : input.numel() / input.dim(-1);
  if (num_rows != 0) {
    ffi::check_last_dim_contiguous(input);
    ffi::check_last_dim_contiguous(out);
    ffi::check_no_broadcast(out);
    ffi::check_disjoint(out, input);
  }
  if (num_rows > INT32_MAX || hidden_size > INT32_MAX) {
    ffi::raise("ValueError", "`input` must have fewer than 2^31 rows and columns, got shape %s",
               input.shape_text().c_str());
  }
  ActAndMulParams params = {};
  if (num_rows != 0) {
    params.input = input.data();
    params.out = out.data();
    params.input_stride = ffi::row_stride(input);
    params.out_stride = ffi::row_stride(out);
    params.num_rows = static_cast<uint32_t>(num_rows);
    params.hidden_size = static_cast<uint32_t>(hidden_size);
    constexpr int64_t kVecSize = 16 / (kDtype.bits / 8);
    params.vectorizable = hidden_size % kVecSize == 0 && params.input_stride % kVecSize == 0 &&
                          params.out_stride % kVecSize == 0 && ffi::is_aligned(input, 16) &&
                          ffi::is_aligned(out, 16);
  }
  ffi::check_cuda(input);
  ffi::check_same_device(out, input);
  if (num_rows == 0) return;

  const ffi::DeviceGuard guard(input);
  ffi::check_launch(
      act_and_mul(params, ffi::resolve_pdl(enable_pdl, input), ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(act_and_mul, args) { flashinfer::run(args); }
