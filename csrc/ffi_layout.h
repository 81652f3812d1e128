// Checks of layouts that several bindings ask for.
#pragma once

#include "ffi.h"

namespace flashinfer::ffi {

inline void check_contiguous(const Tensor& tensor) {
  int64_t expected = 1;
  for (int i = tensor.ndim() - 1; i >= 0; --i) {
    if (tensor.dim(i) == 0) return;
    if (tensor.dim(i) != 1 && tensor.stride(i) != expected) {
      raise("ValueError", "`%s` must be contiguous, got strides %s for shape %s", tensor.name,
            list_text(tensor.dl->strides, tensor.ndim()).c_str(), tensor.shape_text().c_str());
    }
    expected *= tensor.dim(i);
  }
}

// Elements from one row to the next when all leading dimensions are seen as one, or a ValueError.
inline int64_t row_stride(const Tensor& tensor) {
  int64_t stride = -1, rows = 1;
  for (int i = tensor.ndim() - 2; i >= 0; --i) {
    if (tensor.dim(i) == 1) continue;
    if (stride < 0) stride = tensor.stride(i);
    if (tensor.stride(i) != rows * stride) {
      raise("ValueError",
            "`%s` must have leading dimensions that fold into one (a contiguous tensor, or a "
            "column slice of one), got strides %s",
            tensor.name, list_text(tensor.dl->strides, tensor.ndim()).c_str());
    }
    rows *= tensor.dim(i);
  }
  return stride < 0 ? tensor.dim(-1) : stride;
}

}  // namespace flashinfer::ffi
