//   one_row(out, a, b, bias, splits, enable_pdl, weight_ready[, norm])
//
// out = a b + bias, with one row of `a`, and `b` [k, n] whose rows are contiguous.
//   norm      (residual_out, normed_out, residual, norm_weight, eps): normed_out, the norm of
//             residual_out = a + residual, is multiplied
#include "one_row.h"

#include "ffi.h"
#include "index_binding.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;

void check_rows(const Tensor& tensor) {
  ffi::check_dtype(tensor, kDtype);
  ffi::check_ndim(tensor, 2, 2);
  ffi::check_last_dim_contiguous(tensor);
  const bool aligned = tensor.dim(0) <= 1 || tensor.stride(0) % 8 == 0;
  if (!aligned || tensor.dim(1) % 8 != 0 || !ffi::is_aligned(tensor, 16)) {
    ffi::raise("ValueError",
               "`%s` must have rows of whole, aligned 16 bytes, got shape %s and row stride %lld",
               tensor.name, tensor.shape_text().c_str(), static_cast<long long>(tensor.stride(0)));
  }
}

#if FLASHINFER_CFG_NORM

// The norm's part of the parameters; `a`, `b`, `bias` and `out` have been checked.
void take_norm(ffi::Args& args, OneRowParams& params, const Tensor& a, const Tensor& b,
               const Tensor& bias, const Tensor& out) {
  const Tensor residual_out = args.tensor("residual_out"), normed = args.tensor("normed_out");
  const Tensor residual = args.tensor("residual"), weight = args.tensor("norm_weight");
  params.eps = static_cast<float>(args.number("eps"));
  const int64_t k = a.dim(1);
  for (const Tensor& tensor : {residual_out, normed, residual}) {
    check_rows(tensor);
    ffi::check_shape(tensor, {1, k});
  }
  ffi::check_dtype(weight, kDtype);
  ffi::check_shape(weight, {k});
  ffi::check_last_dim_contiguous(weight);
  if (!ffi::is_aligned(weight, 16)) {
    ffi::raise("ValueError", "`%s` must be aligned to 16 bytes", weight.name);
  }
  ffi::check_disjoint(residual_out, normed);
  for (const Tensor& written : {residual_out, normed}) {
    for (const Tensor& tensor : {a, residual, weight, b, bias, out}) {
      if (tensor) ffi::check_disjoint(written, tensor);
    }
  }
  for (const Tensor& tensor : {residual, weight}) ffi::check_disjoint(out, tensor);
  for (const Tensor& tensor : {residual_out, normed, residual, weight}) {
    ffi::check_same_device(tensor, a);
  }
  params.residual = residual.data();
  params.norm_weight = weight.data();
  params.residual_out = residual_out.data();
  params.normed = normed.data();
}

#endif

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(one_row, args) {
  using namespace flashinfer;
  const ffi::Tensor out = args.tensor("out"), a = args.tensor("a"), b = args.tensor("b");
  const ffi::Tensor bias = args.optional_tensor("bias");
  const int64_t splits = args.integer_in("splits", 1, 8);
  const bool enable_pdl = args.flag("pdl");
  const bool weight_ready = args.flag("weight_ready");
#if FLASHINFER_CFG_NORM
  ffi::Args norm = args.group("norm", 5);
#endif
  args.all_taken();

  for (const ffi::Tensor& tensor : {a, b, out}) check_rows(tensor);
  const int64_t k = a.dim(1), n = b.dim(1);
  ffi::check_count(a, "rows", a.dim(0), 1, 1);
  ffi::check_count(a, "columns", k);
  ffi::check_count(b, "columns", n);
  ffi::check_shape(b, {k, n});
  ffi::check_shape(out, {1, n});
  if (bias) {
    ffi::check_dtype(bias, kDtype);
    ffi::check_shape(bias, {n});
    ffi::check_last_dim_contiguous(bias);
    if (!ffi::is_aligned(bias, 4)) {
      ffi::raise("ValueError", "`bias` must be aligned to 4 bytes");
    }
  }
  for (const ffi::Tensor& in : {a, b, bias}) {
    if (in) ffi::check_disjoint(out, in);
  }
  ffi::check_cuda(a);
  for (const ffi::Tensor& tensor : {b, out, bias}) {
    if (tensor) ffi::check_same_device(tensor, a);
  }
  OneRowParams params = {};
#if FLASHINFER_CFG_NORM
  take_norm(norm, params, a, b, bias, out);
  norm.all_taken();
#endif
  if (n == 0) return;
  params.a = a.data();
  params.b = b.data();
  params.b_stride = b.stride(0);
  params.bias = bias ? bias.data() : nullptr;
  params.out = out.data();
  params.n = static_cast<uint32_t>(n);
  params.k = static_cast<uint32_t>(k);
  params.weight_ready = weight_ready;
  const ffi::DeviceGuard guard(a);
  ffi::check_launch(
      one_row(params, static_cast<uint32_t>(splits), enable_pdl, ffi::current_stream(a)));
}
