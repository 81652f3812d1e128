// Which keys a query sees.
#pragma once

#include <cstdint>
#include <flashinfer/attention/attention_params.h>

namespace flashinfer {

// Tokens begin ... end - 1.
struct KeyRange {
  int begin, end;
};

// `draft`: the latest keys are those of the queries themselves, and a word for each query says
// which of them it sees; it sees all keys before them.
enum class MaskMode { none, causal, custom, multi_item, draft };

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

// The lowest `count` bits; 0 or less: none.
__device__ __forceinline__ uint32_t low_bits(int count) {
  return count <= 0 ? 0 : 0xffffffffu >> (32 - min(count, 32));
}

// `count` bits of a packed mask from `bit` on, 32 to a word; the earliest is the lowest, and
// further bits are 0. The loads do not wait for each other. A word of memory is read if it holds
// one of the bits, so it lies within the mask's allocation, which begins and ends with a word.
template <int kWords>
__device__ __forceinline__ void mask_words(const uint8_t* mask, int64_t bit, int count,
                                           uint32_t (&words)[kWords]) {
  const uint64_t address = reinterpret_cast<uint64_t>(mask) + bit / 8;
  const uint32_t* const memory = reinterpret_cast<const uint32_t*>(address & ~uint64_t{3});
  const int shift = static_cast<int>(address % 4) * 8 + static_cast<int>(bit % 8);
  uint32_t read[kWords + 1];
#pragma unroll
  for (int i = 0; i <= kWords; ++i) read[i] = count > 0 && shift + count > 32 * i ? memory[i] : 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = __funnelshift_r(read[i], read[i + 1], shift) & low_bits(count - 32 * i);
  }
}

// Up to 32 of them.
__device__ __forceinline__ uint32_t mask_bits(const uint8_t* mask, int64_t bit, int count) {
  uint32_t words[1];
  mask_words(mask, bit, count, words);
  return words[0];
}

// How many of the latest keys, its own included, a query of multi-item scoring sees besides the
// prefix: those of its item. A query before the items sees all, and one after them none.
__device__ __forceinline__ int keys_of_item(const WorkItem& item, int position,
                                            const VariantParams& params) {
  const int in_items = position - static_cast<int>(params.prefix_len_ptr[item.request]);
  if (in_items < 0) return position + 1;
  if (in_items >= static_cast<int>(params.token_pos_in_items_len)) return 0;
  const int64_t entry = int64_t{item.request} * params.token_pos_in_items_len + in_items;
  return static_cast<int>(params.token_pos_in_items_ptr[entry]);
}

// Which of the queries' own keys a query sees, the earliest the lowest bit. There are at most 32.
__device__ __forceinline__ uint32_t draft_bits(const WorkItem& item, const QueryRow& row,
                                               const VariantParams& params) {
  return reinterpret_cast<const uint32_t*>(params.custom_mask)[item.qo_begin + row.qo_idx];
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
    const int position = row.qo_idx + item.kv_len - item.qo_len;
    return kv_idx < static_cast<int>(params.prefix_len_ptr[item.request]) ||
           position - kv_idx < keys_of_item(item, position, params);
  } else if constexpr (kMask == MaskMode::draft) {
    const int own = kv_idx - (item.kv_len - item.qo_len);
    return own < 0 || draft_bits(item, row, params) >> min(own, 31) & 1;
  } else {
    return true;
  }
}

}  // namespace flashinfer
