// Arguments of the kernel that copies keys and values out of pages (gather.cuh). Plain C++.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>

namespace flashinfer {

// A cache, and the rows that its tokens become.
struct GatherOperand {
  const char* cache;
  char* rows;                                     // [tokens, heads, row], contiguous
  int64_t page_stride, slot_stride, head_stride;  // [bytes], of the cache
  FastDivisor units_per_row;                      // 16 bytes each, of one head
  uint32_t units_per_token;
};

struct GatherParams {
  GatherOperand operands[2];    // keys and values
  const int32_t* pages;         // page numbers of all requests
  const int32_t* page_indptr;   // [batch_size + 1] first page number of each request
  const int32_t* token_indptr;  // [batch_size + 1] first row of each request
  FastDivisor page_size;
  int32_t batch_size, num_tokens, num_pages;  // num_pages: of the caches
};

}  // namespace flashinfer
