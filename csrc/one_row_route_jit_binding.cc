//   one_row_route(logits, a, b, bias, splits, enable_pdl, weight_ready, norm, route)
//
// The product of one_row() with a norm, which gives the logits of a token's experts, and the choice
// of those with the largest ones. Tuples:
//
//   norm     (residual_out, normed_out, residual, norm_weight, eps)
//   route    (topk_values, topk_indices, renormalize, routed_scaling_factor)
#include "one_row_route.h"

#include "one_row_binding.h"

FLASHINFER_FFI_EXPORT(one_row_route, args) {
  using namespace flashinfer;
  using ffi::Tensor;
  constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
  constexpr int64_t kMaxExperts = FLASHINFER_CFG_COLUMNS, kMaxChoices = 32;
  const Tensor logits = args.tensor("logits"), a = args.tensor("input"), b = args.tensor("b");
  const Tensor bias = args.optional_tensor("bias");
  const int64_t splits = args.integer_in("splits", 1, 16);
  const bool enable_pdl = args.flag("enable_pdl");
  const bool weight_ready = args.flag("weight_ready");
  const ffi::Args norm = args.group("norm", 5);
  ffi::Args choice = args.group("route", 4);
  const Tensor weights = choice.tensor("topk_values"), experts = choice.tensor("topk_indices");
  const bool renormalize = choice.flag("renormalize");
  const float scale = choice.float32("routed_scaling_factor");
  args.all_taken();

  OneRowRouteParams params = {};
  static_cast<OneRowParams&>(params) = take_product(a, b, bias, weight_ready, kDtype);
  const int64_t count = b.dim(1);
  ffi::check_count(b, "columns", count, 1, kMaxExperts);
  check_wide_rows(logits, kDtype);
  ffi::check_shape(logits, {1, count});
  ffi::check_dtype(weights, ffi::dtype::float32);
  ffi::check_dtype(experts, ffi::dtype::int32);
  ffi::check_ndim(weights, 2, 2);
  const int64_t top_k = weights.dim(1);
  ffi::check_count(weights, "columns", top_k, 1, count < kMaxChoices ? count : kMaxChoices);
  ffi::check_shape(weights, {1, top_k});
  ffi::check_same_shape(experts, weights);
  ffi::check_disjoint(weights, experts);
  for (const Tensor& written : {logits, weights, experts}) {
    ffi::check_contiguous(written);
    for (const Tensor& in : {a, b, bias}) {
      if (in) ffi::check_disjoint(written, in);
    }
  }
  for (const Tensor& written : {weights, experts}) ffi::check_disjoint(written, logits);
  ffi::check_cuda(a);
  for (const Tensor& tensor : {b, bias, logits, weights, experts}) {
    if (tensor) ffi::check_same_device(tensor, a);
  }
  take_norm(norm, params, a, b, bias, {logits, weights, experts});
  params.out = logits.data();
  params.weights = static_cast<float*>(weights.data());
  params.experts = static_cast<int32_t*>(experts.data());
  params.top_k = static_cast<uint32_t>(top_k);
  params.renormalize = renormalize;
  params.scale = scale;
  const ffi::DeviceGuard guard(a);
  ffi::check_launch(
      one_row_route(params, static_cast<uint32_t>(splits), enable_pdl, ffi::current_stream(a)));
}
