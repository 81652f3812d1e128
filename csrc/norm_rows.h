// Checks that the bindings of norms over rows of 16-byte vectors share.
#pragma once

#include "ffi.h"

namespace flashinfer::ffi {

// [columns], contiguous and at 16 bytes.
inline void check_columns(const Tensor& tensor, DLDataType dtype, int64_t columns) {
  check_vector(tensor, dtype, columns);
  check_aligned(tensor, 16);
}

// The last dimension of `tensor` is whole vectors, at most `most` of them.
inline void check_row_vectors(const Tensor& tensor, int64_t most) {
  const int64_t columns = tensor.dim(-1), vec_size = 16 / tensor.itemsize();
  if (columns > 0 && columns % vec_size == 0 && columns <= most * vec_size) return;
  raise("ValueError",
        "`%s` must have rows of a multiple of %lld elements, at most %lld of them, got shape %s",
        tensor.name, static_cast<long long>(vec_size), static_cast<long long>(most * vec_size),
        tensor.shape_text().c_str());
}

}  // namespace flashinfer::ffi
