// Checks and conversions that the bindings of recurrent layers share: tensors by token and head,
// pools of states, and the integers that say which slot and which tokens belong to a sequence.
#pragma once

#include <flashinfer/linear_attention/tensors.h>

#include "ffi.h"

namespace flashinfer::ffi {

inline void check_integer_dtype(const Tensor& tensor) {
  check_dtype(tensor, {dtype::int32, dtype::int64});
}

inline bool is_int64(const Tensor& tensor) { return tensor && tensor.dtype() == dtype::int64; }

// [batch, tokens, heads, dim] whose rows are read by vectors, of at most 16 bytes.
inline void check_vector_rows(const Tensor& tensor, int64_t vector_size) {
  if (vector_size * tensor.itemsize() > 16) vector_size = 16 / tensor.itemsize();
  check_last_dim_contiguous(tensor);
  bool aligned = is_aligned(tensor, vector_size * tensor.itemsize());
  for (int i = 0; i < tensor.ndim() - 1; ++i) {
    aligned = aligned && (tensor.dim(i) == 1 || tensor.stride(i) % vector_size == 0);
  }
  if (!aligned) {
    raise("ValueError",
          "`%s` must start at a multiple of %lld bytes and have strides that are multiples of %lld "
          "elements, got strides %s",
          tensor.name, static_cast<long long>(vector_size * tensor.itemsize()),
          static_cast<long long>(vector_size),
          list_text(tensor.dl->strides, tensor.ndim()).c_str());
  }
}

inline TokenHeads token_heads(const Tensor& tensor) {
  if (!tensor) return {};
  return {tensor.data(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// [slots, heads, rows, row], each head's matrix contiguous and aligned to 16 bytes.
inline void check_state_pool(const Tensor& pool) {
  const int last = pool.ndim() - 1;
  if (pool.numel() == 0) return;
  bool contiguous = pool.stride(last) == 1 || pool.dim(last) == 1;
  contiguous = contiguous && (pool.stride(last - 1) == pool.dim(last) || pool.dim(last - 1) == 1);
  const int64_t vector_size = 16 / pool.itemsize();
  for (int i = 0; i < last - 1; ++i) {
    contiguous = contiguous && (pool.dim(i) == 1 || pool.stride(i) % vector_size == 0);
  }
  if (!contiguous || !is_aligned(pool, 16)) {
    raise("ValueError",
          "`%s` must be contiguous in its last two dimensions, with slots and heads that start at "
          "multiples of 16 bytes, got strides %s",
          pool.name, list_text(pool.dl->strides, pool.ndim()).c_str());
  }
}

inline StatePool state_pool(const Tensor& pool) {
  if (!pool) return {};
  return {pool.data(), pool.stride(0), pool.stride(1)};
}

// [batch] or [batch, tokens] slots; `max_tokens` 0: only [batch].
inline SlotIndices slot_indices(const Tensor& indices, int64_t batch, int64_t min_tokens) {
  if (!indices) return {};
  check_integer_dtype(indices);
  check_ndim(indices, 1, 2);
  if (indices.dim(0) < batch || (indices.ndim() == 2 && indices.dim(1) < min_tokens)) {
    raise("ValueError", "`%s` must have at least %lld rows and %lld columns, got shape %s",
          indices.name, static_cast<long long>(batch), static_cast<long long>(min_tokens),
          indices.shape_text().c_str());
  }
  const bool by_token = indices.ndim() == 2;
  return {indices.data(), indices.stride(0), by_token ? indices.stride(1) : 0, is_int64(indices),
          by_token ? indices.dim(1) : 1};
}

}  // namespace flashinfer::ffi
