// Shared by the bindings of products of one row.
#pragma once

#include <flashinfer/gemm/one_row_params.h>

#include "wide_rows.h"

namespace flashinfer {

// Checks a row times weights, without where the product goes, and returns its parameters.
inline OneRowParams take_product(const ffi::Tensor& a, const ffi::Tensor& b,
                                 const ffi::Tensor& bias, bool weight_ready, DLDataType dtype) {
  for (const ffi::Tensor& tensor : {a, b}) check_wide_rows(tensor, dtype);
  const int64_t k = a.dim(1), n = b.dim(1);
  ffi::check_count(a, "rows", a.dim(0), 1, 1);
  ffi::check_count(a, "columns", k);
  ffi::check_count(b, "columns", n);
  ffi::check_shape(b, {k, n});
  if (bias) check_wide_vector(bias, dtype, n, 4);
  OneRowParams params = {};
  params.a = a.data();
  params.b = b.data();
  params.b_stride = b.stride(0);
  params.bias = bias ? bias.data() : nullptr;
  params.n = static_cast<uint32_t>(n);
  params.k = static_cast<uint32_t>(k);
  params.weight_ready = weight_ready;
  return params;
}

// Checks the norm's tensors (residual_out, normed_out, residual, norm_weight, eps), when those of
// the product and `written`, which it writes, have been checked.
inline void take_norm(ffi::Args args, OneRowParams& params, const ffi::Tensor& a,
                      const ffi::Tensor& b, const ffi::Tensor& bias,
                      std::initializer_list<ffi::Tensor> written) {
  const DLDataType dtype = a.dtype();
  const ffi::Tensor residual_out = args.tensor("residual_out"), normed = args.tensor("normed_out");
  const ffi::Tensor residual = args.tensor("residual"), weight = args.tensor("norm_weight");
  params.eps = args.float32("eps", ffi::Zero::allowed);
  args.all_taken();
  const int64_t k = a.dim(1);
  for (const ffi::Tensor& tensor : {residual_out, normed, residual}) {
    check_wide_rows(tensor, dtype);
    ffi::check_shape(tensor, {1, k});
  }
  check_wide_vector(weight, dtype, k, 16);
  ffi::check_disjoint(residual_out, normed);
  for (const ffi::Tensor& made : {residual_out, normed}) {
    for (const ffi::Tensor& tensor : {a, residual, weight, b, bias}) {
      if (tensor) ffi::check_disjoint(made, tensor);
    }
    for (const ffi::Tensor& tensor : written) ffi::check_disjoint(made, tensor);
  }
  for (const ffi::Tensor& tensor : written) {
    for (const ffi::Tensor& in : {residual, weight}) ffi::check_disjoint(tensor, in);
  }
  for (const ffi::Tensor& tensor : {residual_out, normed, residual, weight}) {
    ffi::check_same_device(tensor, a);
  }
  params.residual = residual.data();
  params.norm_weight = weight.data();
  params.residual_out = residual_out.data();
  params.normed = normed.data();
}

}  // namespace flashinfer
