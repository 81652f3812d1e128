// Shared by the bindings of the rope modules: operands from tensors, positions, the cos-sin cache.
#pragma once

#include "ffi.h"
#include "index_binding.h"
#include "rope.h"

namespace flashinfer {

inline constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
inline constexpr DLDataType kOutDtype = ffi::dtype::FLASHINFER_CFG_OUT_DTYPE;
inline constexpr DLDataType kCacheDtype = ffi::dtype::FLASHINFER_CFG_CACHE_DTYPE;
// A vector is 16 bytes of the input; its counterparts in the other tensors have as many elements.
inline constexpr int64_t kVecSize = 16 / (kDtype.bits / 8);

// Tracks whether all rows of all tensors seen are whole, aligned vectors.
class RopeAlignment {
 public:
  // The rows start `offset` elements into each row of the tensor.
  void rows(const ffi::Tensor& tensor, int64_t offset = 0) {
    if (tensor.numel() == 0) return;  // whatever strides it has
    const int64_t vec_bytes = kVecSize * tensor.itemsize();
    const int64_t bytes = vec_bytes < 16 ? vec_bytes : 16;
    require(ffi::is_aligned(tensor, bytes) && offset % kVecSize == 0);
    for (int i = 0; i < tensor.ndim() - 1; ++i) {
      require(tensor.dim(i) <= 1 || tensor.stride(i) * tensor.itemsize() % bytes == 0);
    }
  }
  void require(bool condition) { vectorizable_ = vectorizable_ && condition; }
  bool vectorizable() const { return vectorizable_; }

 private:
  bool vectorizable_ = true;
};

// Rows of a [tokens, heads, dim] tensor, or of a [tokens, dim] tensor for one head, from column
// `offset` on.
inline RopeRows rope_rows(const ffi::Tensor& tensor, int64_t offset = 0) {
  RopeRows rows;
  rows.data = static_cast<char*>(tensor.data()) + offset * tensor.itemsize();
  rows.stride_token = tensor.stride(0);
  rows.stride_head = tensor.ndim() == 3 ? tensor.stride(1) : 0;
  return rows;
}

// Adds heads that are all rotated or all copied; adds nothing if there are none.
inline void add_segment(RopeParams& params, const RopeRows& in, const RopeRows& out,
                        int64_t num_heads, int64_t dim, bool rotates, float scale = 1.f,
                        bool appends = false) {
  if (num_heads == 0 || dim == 0) return;
  RopeSegment& segment = params.segments[params.num_segments++];
  segment.in = in;
  segment.out = out;
  segment.num_heads = static_cast<uint32_t>(num_heads);
  segment.dim = static_cast<uint32_t>(dim);
  segment.rotates = rotates;
  segment.appends = appends;
  segment.scale = scale;
}

inline void check_positions(RopeParams& params, const ffi::Tensor& pos_ids, int64_t num_tokens) {
  ffi::check_vector(pos_ids, {ffi::dtype::int32, ffi::dtype::int64}, num_tokens);
  params.pos_ids = pos_ids.data();
  params.pos_ids_are_64_bit = pos_ids.dtype().bits == 64;
}

// Checks a cache [max position + 1, rope_dim] and returns rope_dim.
inline int64_t check_cos_sin_cache(RopeParams& params, RopeAlignment& alignment,
                                   const ffi::Tensor& cache) {
  ffi::check_dtype(cache, kCacheDtype);
  ffi::check_ndim(cache, 2, 2);
  ffi::check_last_dim_contiguous(cache);
  if (cache.dim(1) < 2 || cache.dim(1) % 2 != 0) {
    ffi::raise("ValueError", "`%s` must have an even, positive number of columns, got shape %s",
               cache.name, cache.shape_text().c_str());
  }
  params.rope_dim = static_cast<uint32_t>(cache.dim(1));
  params.cos_sin_cache = cache.data();
  params.cos_sin_stride = cache.stride(0);
  params.cache_rows = cache.dim(0);
  // Loads of the cache are kVecSize elements wide, in accesses of at most 16 bytes.
  alignment.rows(cache);
  alignment.require(cache.dim(1) / 2 % kVecSize == 0);
  return cache.dim(1);
}

inline void launch_checked(const RopeCallParams& params, const RopeAlignment& alignment,
                           ffi::Args::Flag enable_pdl, const ffi::Tensor& on) {
  if (params.num_tokens == 0 || params.num_segments == 0) return;
  const ffi::DeviceGuard guard(on);
  ffi::check_launch(rope(params, alignment.vectorizable(), ffi::resolve_pdl(enable_pdl, on),
                         ffi::current_stream(on)));
}

}  // namespace flashinfer
