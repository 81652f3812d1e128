// Checks of rows and vectors that products of one and of few rows load 16 bytes at a time.
#pragma once

#include "ffi.h"
#include "index_binding.h"

namespace flashinfer {

inline void check_wide_rows(const ffi::Tensor& tensor, DLDataType dtype) {
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

inline void check_wide_vector(const ffi::Tensor& tensor, DLDataType dtype, int64_t size,
                              int bytes) {
  ffi::check_vector(tensor, dtype, size);
  ffi::check_aligned(tensor, bytes);
}

}  // namespace flashinfer
