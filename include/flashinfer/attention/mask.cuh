// Which keys a query sees.
#pragma once

#include <cstdint>
#include <flashinfer/attention/attention_params.h>

namespace flashinfer {

enum class MaskMode { none, causal, custom, multi_item };

// One query row of a work item, as masks and variants see it.
struct QueryRow {
  int32_t qo_idx;
  int32_t first_kv, last_kv;  // keys within bounds, causality and window; both ends included
  uint32_t qo_head_idx;
};

template <MaskMode kMask, bool kWindow>
__device__ __forceinline__ QueryRow make_query_row(const WorkItem& item, uint32_t packed_row,
                                                   const FastDivisor& group_size, uint32_t kv_head,
                                                   int window_left) {
  QueryRow row;
  row.qo_idx = static_cast<int32_t>(group_size.divide(packed_row));
  row.qo_head_idx = kv_head * group_size.divisor + packed_row - row.qo_idx * group_size.divisor;
  const int position = row.qo_idx + item.kv_len - item.qo_len;
  row.first_kv = 0;
  row.last_kv = item.kv_end - 1;
  if constexpr (kMask == MaskMode::causal || kMask == MaskMode::multi_item) {
    row.last_kv = min(row.last_kv, position);
  }
  if constexpr (kWindow) {
    if (window_left >= 0) row.first_kv = position - window_left;
  }
  return row;
}

// Evaluates the masks that are more than a range of keys.
template <MaskMode kMask>
__device__ __forceinline__ bool is_visible(const WorkItem& item, const QueryRow& row, int kv_idx,
                                           const VariantParams& params) {
  if constexpr (kMask == MaskMode::custom) {
    const int64_t bit = int64_t{row.qo_idx} * item.kv_len + kv_idx;
    const uint8_t* mask = params.custom_mask + params.mask_indptr[item.request];
    return mask[bit / 8] >> (bit % 8) & 1;
  } else if constexpr (kMask == MaskMode::multi_item) {
    // Items follow a common prefix, and a delimiter of position 0 precedes each. A token sees the
    // prefix and the earlier tokens of its own item without the delimiter, as if no other item
    // existed.
    const int prefix_len = static_cast<int>(params.prefix_len_ptr[item.request]);
    const int position = row.qo_idx + item.kv_len - item.qo_len;
    const int in_items = position - prefix_len;
    if (kv_idx < prefix_len || in_items < 0) return true;
    if (in_items >= static_cast<int>(params.token_pos_in_items_len)) return false;
    const int64_t entry = int64_t{item.request} * params.token_pos_in_items_len + in_items;
    return position - kv_idx < static_cast<int>(params.token_pos_in_items_ptr[entry]);
  } else {
    return true;
  }
}

}  // namespace flashinfer
