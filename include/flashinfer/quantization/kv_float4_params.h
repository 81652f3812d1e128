// Arguments of the kernels of 4-bit caches (NVFP4). Plain C++: shared by kernel, launcher, binding.
//
// A row of D elements of a cache has D / 2 bytes of codes (e2m1, the first of two in the lower
// bits) and D / 16 scales (e4m3), one for each block of 16: x = code * scale * global scale.
#pragma once

#include <cstdint>
#include <flashinfer/layout/page_table.h>

namespace flashinfer {

// Codes and scales of keys or of values: [num_pages, page_size, num_heads, row], or heads before
// slots, depending on the strides, which are in bytes.
struct Float4Cache {
  uint8_t* codes;
  uint8_t* scales;
  int64_t codes_stride_page, codes_stride_slot, codes_stride_head;
  int64_t scales_stride_page, scales_stride_slot, scales_stride_head;
};

// Rows of 16 bits, [tokens, num_heads, row]; strides are in elements.
struct Float4Rows {
  void* data;
  int64_t stride_token, stride_head;
};

struct Float4Operand {
  Float4Rows rows;
  Float4Cache cache;
  const float* global_scale;  // one number on the device; null: `global_value`
  float global_value;
};

struct Float4AppendParams {
  Float4Operand operands[2];  // K and V
  PageTable table;            // where tokens go, unless `slots` says it
  const void* slots;          // [num_tokens] page * page_size + slot; negative: padding
  bool has_wide_slots;        // int64, not int32
  uint32_t num_tokens;
  uint32_t num_items;  // blocks of 16 elements of all tokens
  FastDivisor blocks;  // of a row
  FastDivisor heads;
};

struct Float4GatherParams {
  Float4Operand operands[2];    // K and V; rows are [batch_size, max_len] tokens
  const int32_t* block_tables;  // [batch_size, max_pages]; null: page 0 has all tokens
  const int32_t* seq_lens;      // [batch_size]; null: all are max_len
  int64_t table_stride;
  uint32_t max_pages, num_pages;
  uint32_t num_operands;
  uint32_t
      num_items[2];  // blocks of 16 elements of an operand; heads of K and V may differ in size
  FastDivisor blocks[2];  // of a row
  FastDivisor heads, max_len, page_size;
};

}  // namespace flashinfer
