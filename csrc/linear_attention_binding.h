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

// [batch, tokens, heads, dim] whose rows are read so many elements at once, but at most 16 bytes.
inline void check_rows_of_vectors(const Tensor& tensor, int64_t elements) {
  const int64_t bytes = elements * tensor.itemsize();
  check_aligned_rows(tensor, bytes < 16 ? static_cast<int>(bytes) : 16);
}

// Sequences of a call: batches of `tokens`, or what cu_seqlens says of its only batch.
inline int64_t num_sequences(const Tensor& tokens, const Tensor& cu_seqlens) {
  if (!cu_seqlens) return tokens.dim(0);
  check_integer_dtype(cu_seqlens);
  check_ndim(cu_seqlens, 1, 1);
  check_last_dim_contiguous(cu_seqlens);
  if (cu_seqlens.dim(0) < 1) {
    raise("ValueError", "`%s` must have at least one element, got shape %s", cu_seqlens.name,
          cu_seqlens.shape_text().c_str());
  }
  if (tokens.dim(0) != 1) {
    raise("ValueError", "`%s` must have a batch of 1 with `%s`, got shape %s", tokens.name,
          cu_seqlens.name, tokens.shape_text().c_str());
  }
  return cu_seqlens.dim(0) - 1;
}

// For kernels whose grid has sequences in its last dimension.
inline void check_fits_grid(const Tensor& tensor, int64_t count, const char* what) {
  if (count <= 65535) return;
  raise("ValueError", "`%s` must have at most 65535 %s, got shape %s", tensor.name, what,
        tensor.shape_text().c_str());
}

inline void check_sequences_fit_grid(const Tensor& tokens, const Tensor& cu_seqlens) {
  check_fits_grid(cu_seqlens ? cu_seqlens : tokens, num_sequences(tokens, cu_seqlens), "sequences");
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
  if (!pool) return {nullptr, 0, 0, INT64_MAX};
  return {pool.data(), pool.stride(0), pool.stride(1), pool.dim(0)};
}

// [batch] slots, or [batch, tokens] with at least `min_tokens` columns.
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
