// Checks that the bindings of hyper-connections share.
#pragma once

#include "ffi.h"

#include <flashinfer/mhc/mhc_streams.h>

namespace flashinfer::ffi {

// [..., 4, hidden_size], whole vectors of 16 bytes; what else a call takes has its leading
// dimensions.
inline void check_mhc_streams(const Tensor& residual, DLDataType dtype) {
  check_dtype(residual, dtype);
  check_ndim(residual, 3, 8);
  const int64_t hidden_size = residual.dim(-1), vec_size = 16 / residual.itemsize();
  if (residual.dim(-2) != kMhcStreams || hidden_size == 0 || hidden_size % vec_size != 0) {
    raise("ValueError",
          "`%s` must have shape [..., 4, hidden_size] with hidden_size a multiple of %lld, got %s",
          residual.name, static_cast<long long>(vec_size), residual.shape_text().c_str());
  }
  if (residual.numel() / vec_size > INT32_MAX) {
    raise("ValueError", "`%s` must have less than 2^31 vectors of 16 bytes, got shape %s",
          residual.name, residual.shape_text().c_str());
  }
}

// Checks a contiguous tensor that has the leading dimensions of `residual`, then `trailing`. A
// dimension of `splits`, unless that is 0, comes first. Vectors must begin at 16 bytes.
inline void check_mhc_tensor(const Tensor& tensor, DLDataType dtype, const Tensor& residual,
                             std::initializer_list<int64_t> trailing, int64_t splits = 0,
                             bool has_vectors = true) {
  int64_t shape[16];
  int ndim = 0;
  if (splits != 0) shape[ndim++] = splits;
  for (int i = 0; i + 2 < residual.ndim(); ++i) shape[ndim++] = residual.dim(i);
  for (const int64_t size : trailing) shape[ndim++] = size;
  check_dtype(tensor, dtype);
  check_shape(tensor, shape, ndim);
  check_contiguous(tensor);
  if (has_vectors && tensor.numel() != 0) check_aligned(tensor, 16);
}

inline uint32_t mhc_tokens(const Tensor& residual) {
  return static_cast<uint32_t>(residual.numel() / (kMhcStreams * residual.dim(-1)));
}

}  // namespace flashinfer::ffi
