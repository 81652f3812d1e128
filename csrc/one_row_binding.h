// Shared by the bindings of products of one row.
#pragma once

#include <flashinfer/gemm/one_row_params.h>

#include "ffi.h"
#include "index_binding.h"

namespace flashinfer {

inline void check_one_row(const ffi::Tensor& tensor, DLDataType dtype) {
  ffi::check_dtype(tensor, dtype);
  ffi::check_ndim(tensor, 2, 2);
  ffi::check_last_dim_contiguous(tensor);
  const bool aligned = tensor.dim(0) <= 1 || tensor.stride(0) % 8 == 0;
  if (!aligned || tensor.dim(1) % 8 != 0 || !ffi::is_aligned(tensor, 16)) {
    ffi::raise("ValueError",
               "`%s` must have rows of whole, aligned 16 bytes, got shape %s and row stride %lld",
               tensor.name, tensor.shape_text().c_str(), static_cast<long long>(tensor.stride(0)));
  }
}

// Checks a row times weights, without where the product goes, and returns its parameters.
inline OneRowParams take_product(const ffi::Tensor& a, const ffi::Tensor& b,
                                 const ffi::Tensor& bias, bool weight_ready, DLDataType dtype) {
  for (const ffi::Tensor& tensor : {a, b}) check_one_row(tensor, dtype);
  const int64_t k = a.dim(1), n = b.dim(1);
  ffi::check_count(a, "rows", a.dim(0), 1, 1);
  ffi::check_count(a, "columns", k);
  ffi::check_count(b, "columns", n);
  ffi::check_shape(b, {k, n});
  if (bias) {
    ffi::check_dtype(bias, dtype);
    ffi::check_shape(bias, {n});
    ffi::check_last_dim_contiguous(bias);
    if (!ffi::is_aligned(bias, 4)) {
      ffi::raise("ValueError", "`bias` must be aligned to 4 bytes");
    }
  }
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
  params.eps = static_cast<float>(args.number("eps"));
  args.all_taken();
  const int64_t k = a.dim(1);
  for (const ffi::Tensor& tensor : {residual_out, normed, residual}) {
    check_one_row(tensor, dtype);
    ffi::check_shape(tensor, {1, k});
  }
  ffi::check_dtype(weight, dtype);
  ffi::check_shape(weight, {k});
  ffi::check_last_dim_contiguous(weight);
  if (!ffi::is_aligned(weight, 16)) {
    ffi::raise("ValueError", "`%s` must be aligned to 16 bytes", weight.name);
  }
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
