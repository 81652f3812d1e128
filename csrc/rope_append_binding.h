// Shared by the bindings of the rope modules that write to several tensors, or to a paged cache.
#pragma once

#include "rope_binding.h"

namespace flashinfer {

// Rows of a cache from column `offset` on; dimension 1 or 2 holds the slots, the other one (if any)
// the heads.
inline RopeRows cache_rows(RopeAlignment& alignment, const ffi::Tensor& cache, bool is_hnd,
                           int64_t offset) {
  const ffi::CacheAxes axes = ffi::cache_axes(is_hnd);
  const bool has_heads = cache.ndim() == 4;
  RopeRows rows;
  rows.data = static_cast<char*>(cache.data()) + offset * cache.itemsize();
  rows.stride_page = cache.stride(0);
  rows.stride_token = cache.stride(has_heads ? axes.slot : 1);
  rows.stride_head = has_heads ? cache.stride(axes.head) : 0;
  alignment.rows(cache, offset);
  return rows;
}

inline void check_cache(const ffi::Tensor& cache, std::initializer_list<int64_t> shape) {
  ffi::check_dtype(cache, kOutDtype);
  ffi::check_shape(cache, shape);
  ffi::check_last_dim_contiguous(cache);
  ffi::check_no_broadcast(cache);
}

// The arguments that say where tokens go.
struct Pages {
  ffi::Tensor kv_indices, kv_indptr, batch_indices, positions;
  int64_t page_size;

  explicit Pages(ffi::Args args)
      : kv_indices(args.tensor("kv_indices")),
        kv_indptr(args.tensor("kv_indptr")),
        batch_indices(args.tensor("batch_indices")),
        positions(args.tensor("positions")),
        page_size(args.integer_in("page_size", 1, INT32_MAX)) {}
};

// `page_size` is an argument, and `axis` of the caches must agree with it.
inline int64_t check_pages(const ffi::Tensor& cache, int axis, int64_t page_size) {
  if (page_size != cache.dim(axis)) {
    ffi::raise("ValueError", "`page_size` must be %lld as in `paged_kv_cache`, got %lld",
               static_cast<long long>(cache.dim(axis)), static_cast<long long>(page_size));
  }
  ffi::check_count(cache, "pages", cache.dim(0));
  return cache.dim(0);
}

inline void check_written(std::initializer_list<ffi::Tensor> written,
                          std::initializer_list<ffi::Tensor> read) {
  for (const ffi::Tensor& out : written) {
    if (!out) continue;
    for (const ffi::Tensor& in : read) {
      if (in) ffi::check_disjoint(out, in);
    }
    for (const ffi::Tensor& other : written) {
      if (other && other.dl != out.dl) ffi::check_disjoint(out, other);
    }
  }
}

inline void check_devices(const ffi::Tensor& on, std::initializer_list<ffi::Tensor> tensors) {
  ffi::check_cuda(on);
  for (const ffi::Tensor& tensor : tensors) {
    if (tensor) ffi::check_same_device(tensor, on);
  }
}

}  // namespace flashinfer
