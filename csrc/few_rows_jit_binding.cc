//   few_rows(out, a, b, bias, splits, enable_pdl, weight_ready[, norm])
//
// out = a b + bias, with up to 8 rows of `a`, and `b` [k, n] whose rows are contiguous. With a gate
// out is [m, n / 2], silu of the first half of a b times the second.
//   norm      (parts, residual, norm_weight, eps): out is the norm of residual += a b; parts
//             [splits, m, n] float32 is overwritten
#include "few_rows.h"

#include "wide_rows.h"

namespace flashinfer {
namespace {

using ffi::Tensor;

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr FewRowsOutput kOutput = FewRowsOutput::FLASHINFER_CFG_OUTPUT;
constexpr bool kGated = kOutput == FewRowsOutput::kGated, kNorm = kOutput == FewRowsOutput::kNorm;

struct Norm {
  Tensor parts, residual, weight;
  float eps = 0.f;
};

Norm take_norm(ffi::Args args) {
  Norm norm;
  norm.parts = args.tensor("parts");
  norm.residual = args.tensor("residual");
  norm.weight = args.tensor("norm_weight");
  norm.eps = args.float32("eps", ffi::Zero::allowed);
  args.all_taken();
  return norm;
}

// `out`, `a`, `b` and the sizes have been checked.
void check_norm(const Norm& norm, const FewRowsParams& params, const Tensor& out, const Tensor& a,
                const Tensor& b) {
  const auto& [parts, residual, weight, eps] = norm;
  const int64_t m = a.dim(0), n = b.dim(1);
  if (n % 256 != 0 || n > 4096) {
    ffi::raise("ValueError",
               "`b` must have a multiple of 256 columns with a norm, at most 4096, got shape %s",
               b.shape_text().c_str());
  }
  ffi::check_dtype(parts, ffi::dtype::float32);
  ffi::check_shape(parts, {params.splits, m, n});
  ffi::check_contiguous(parts);
  check_wide_rows(residual, kDtype);
  ffi::check_shape(residual, {m, n});
  ffi::check_no_broadcast(residual);
  check_wide_vector(weight, kDtype, n, 16);
  for (const Tensor& written : {out, residual, parts}) {
    for (const Tensor& read : {a, b, weight}) ffi::check_disjoint(written, read);
  }
  ffi::check_disjoint(out, residual);
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(few_rows, args) {
  using namespace flashinfer;
  const ffi::Tensor out = args.tensor("out"), a = args.tensor("a"), b = args.tensor("b");
  const ffi::Tensor bias = args.optional_tensor("bias");
  FewRowsParams params = {};
  params.splits = static_cast<uint32_t>(args.integer_in("splits", 1, 8));
  const bool enable_pdl = args.flag("pdl");
  params.weight_ready = args.flag("weight_ready");
  Norm norm;
  if constexpr (kNorm) norm = take_norm(args.group("norm", 4));
  args.all_taken();

  if (kGated && params.splits != 1) {
    ffi::raise("ValueError", "`splits` must be 1 with a gate, got %u", params.splits);
  }
  for (const ffi::Tensor& tensor : {a, b, out}) check_wide_rows(tensor, kDtype);
  const int64_t m = a.dim(0), k = a.dim(1), n = b.dim(1);
  ffi::check_count(a, "rows", m, 1, 8);
  ffi::check_count(a, "columns", k);
  ffi::check_count(b, "columns", n);
  ffi::check_shape(b, {k, n});
  ffi::check_shape(out, {m, kGated ? n / 2 : n});
  ffi::check_no_broadcast(out);
  if (k % 16 != 0 || n % FLASHINFER_CFG_COLUMNS != 0) {
    ffi::raise("ValueError", "`b` must have a multiple of 16 rows and of %d columns, got shape %s",
               FLASHINFER_CFG_COLUMNS, b.shape_text().c_str());
  }
  if (bias) {
    if (kOutput != FewRowsOutput::kProduct) {
      ffi::raise("ValueError", "`bias` must be None with a gate or a norm");
    }
    check_wide_vector(bias, kDtype, n, 4);
  }
  for (const ffi::Tensor& in : {a, b, bias}) {
    if (in) ffi::check_disjoint(out, in);
  }
  if constexpr (kNorm) check_norm(norm, params, out, a, b);
  ffi::check_cuda(a);
  for (const ffi::Tensor& tensor : {b, out, bias}) {
    if (tensor) ffi::check_same_device(tensor, a);
  }
  if constexpr (kNorm) {
    for (const ffi::Tensor& tensor : {norm.parts, norm.residual, norm.weight}) {
      ffi::check_same_device(tensor, a);
    }
    params.parts = static_cast<float*>(norm.parts.data());
    params.residual = norm.residual.data();
    params.residual_stride = norm.residual.stride(0);
    params.norm_weight = norm.weight.data();
    params.eps = norm.eps;
  }
  if (n == 0) return;
  params.a = a.data();
  params.b = b.data();
  params.bias = bias ? bias.data() : nullptr;
  params.out = out.data();
  params.a_stride = a.stride(0);
  params.b_stride = b.stride(0);
  params.out_stride = out.stride(0);
  params.m = static_cast<uint32_t>(m);
  params.n = static_cast<uint32_t>(n);
  params.k = static_cast<uint32_t>(k);
  const ffi::DeviceGuard guard(a);
  ffi::check_launch(few_rows(params, enable_pdl, ffi::current_stream(a)));
}
