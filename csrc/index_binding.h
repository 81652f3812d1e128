// Checks that bindings with index tensors and paged caches share.
#pragma once

#include <flashinfer/layout/page_table.h>

#include "ffi.h"

namespace flashinfer::ffi {

// Checks a contiguous int32 vector of `length` elements; a negative `length` allows any.
inline void check_indices(const Tensor& tensor, int64_t length) {
  check_dtype(tensor, dtype::int32);
  check_ndim(tensor, 1, 1);
  if (length >= 0) check_shape(tensor, {length});
  check_last_dim_contiguous(tensor);
  if (tensor.dim(0) > INT32_MAX) {
    raise("ValueError", "`%s` must have fewer than 2^31 elements, got shape %s", tensor.name,
          tensor.shape_text().c_str());
  }
}

// Checks a tensor [batch_size + 1] and returns batch_size.
inline int64_t check_indptr(const Tensor& indptr) {
  check_indices(indptr, -1);
  if (indptr.dim(0) < 1) {
    raise("ValueError", "`%s` must have at least one element, got shape %s", indptr.name,
          indptr.shape_text().c_str());
  }
  return indptr.dim(0) - 1;
}

inline void check_count(const Tensor& tensor, const char* what, int64_t count, int64_t low = 0,
                        int64_t high = INT32_MAX) {
  if (count < low || count > high) {
    raise("ValueError", "`%s` must have %s from %lld to %lld, got shape %s", tensor.name, what,
          static_cast<long long>(low), static_cast<long long>(high), tensor.shape_text().c_str());
  }
}

// The second dimension of a grid counts heads, or groups of them.
constexpr int64_t kMaxHeads = 65535;

inline PageTable make_page_table(const Tensor& batch_indices, const Tensor& positions,
                                 const Tensor& kv_indices, const Tensor& kv_indptr,
                                 int64_t num_tokens, int64_t num_pages, int64_t page_size) {
  check_indices(batch_indices, num_tokens);
  check_indices(positions, num_tokens);
  check_indices(kv_indices, -1);
  PageTable table;
  table.batch_size = static_cast<uint32_t>(check_indptr(kv_indptr));
  table.batch_indices = static_cast<const int32_t*>(batch_indices.data());
  table.positions = static_cast<const int32_t*>(positions.data());
  table.indices = static_cast<const int32_t*>(kv_indices.data());
  table.indptr = static_cast<const int32_t*>(kv_indptr.data());
  table.num_indices = static_cast<uint32_t>(kv_indices.dim(0));
  table.num_pages = static_cast<uint32_t>(num_pages);
  table.page_size = FastDivisor(static_cast<uint32_t>(page_size));
  return table;
}

// A cache is [pages, page_size, heads, dim] ("NHD") or [pages, heads, page_size, dim] ("HND").
struct CacheAxes {
  int slot, head;
};

inline CacheAxes cache_axes(bool is_hnd) { return is_hnd ? CacheAxes{2, 1} : CacheAxes{1, 2}; }

// Copies move units of the largest size that divides every address, size and stride; this collects
// these, in bytes.
class UnitSize {
 public:
  void divides(int64_t bytes) { bits_ |= static_cast<uint64_t>(bytes); }
  // Collects the address of every row: all strides but the last dimension's.
  void divides_rows(const Tensor& tensor) {
    divides(static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data())));
    divides(tensor.dim(-1) * tensor.itemsize());
    for (int i = 0; i < tensor.ndim() - 1; ++i) {
      if (tensor.dim(i) > 1) divides(tensor.stride(i) * tensor.itemsize());
    }
  }
  uint32_t bytes() const {
    return bits_ % 16 == 0 ? 16 : bits_ % 4 == 0 ? 4 : bits_ % 2 == 0 ? 2 : 1;
  }

 private:
  uint64_t bits_ = 0;
};

}  // namespace flashinfer::ffi
