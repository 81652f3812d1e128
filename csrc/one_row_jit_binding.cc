//   one_row(out, a, b, bias, splits, enable_pdl, weight_ready[, norm])
//
// out = a b + bias, with one row of `a`, and `b` [k, n] whose rows are contiguous.
//   norm      (residual_out, normed_out, residual, norm_weight, eps): normed_out, the norm of
//             residual_out = a + residual, is multiplied
#include "one_row.h"

#include "one_row_binding.h"

FLASHINFER_FFI_EXPORT(one_row, args) {
  using namespace flashinfer;
  constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
  const ffi::Tensor out = args.tensor("out");
  const ffi::Tensor a = args.tensor(FLASHINFER_CFG_NORM ? "input" : "a"), b = args.tensor("b");
  const ffi::Tensor bias = args.optional_tensor("bias");
  const int64_t splits = args.integer_in("splits", 1, 8);
  const bool enable_pdl = args.flag("pdl");
  const bool weight_ready = args.flag("weight_ready");
#if FLASHINFER_CFG_NORM
  ffi::Args norm = args.group("norm", 5);
#endif
  args.all_taken();

  OneRowParams params = take_product(a, b, bias, weight_ready, kDtype);
  check_wide_rows(out, kDtype);
  ffi::check_shape(out, {1, b.dim(1)});
  for (const ffi::Tensor& in : {a, b, bias}) {
    if (in) ffi::check_disjoint(out, in);
  }
#if FLASHINFER_CFG_NORM
  take_norm(norm, params, a, b, bias, {out});
#endif
  ffi::check_cuda(a);
  for (const ffi::Tensor& tensor : {b, out, bias}) {
    if (tensor) ffi::check_same_device(tensor, a);
  }
  if (params.n == 0) return;
  params.out = out.data();
  const ffi::DeviceGuard guard(a);
  ffi::check_launch(
      one_row(params, static_cast<uint32_t>(splits), enable_pdl, ffi::current_stream(a)));
}
