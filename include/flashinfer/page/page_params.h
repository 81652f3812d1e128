// Arguments of the paged-cache kernels. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/layout/page_table.h>

namespace flashinfer {

// One of the two tensors to append, and its cache. Strides are in bytes.
struct AppendOperand {
  const void* source;  // [num_tokens, num_heads, row]
  // [num_pages, page_size, num_heads, row], or heads before slots, depending on the strides
  void* cache;
  int64_t source_stride_token;
  int64_t source_stride_head;
  int64_t cache_stride_page;
  int64_t cache_stride_slot;
  int64_t cache_stride_head;
  uint32_t row_bytes;
  FastDivisor units;       // set at launch: threads of a row
  uint32_t first_cta = 0;  // set at launch
};

struct AppendParams {
  AppendOperand operands[2];  // K and V, or compressed KV and the rotary part of K
  PageTable table;
  uint32_t num_tokens;
  FastDivisor heads;
  uint32_t tokens_per_chunk;  // set at launch: threads are counted off over so many tokens per
                              // blockIdx.y
  bool streams;               // set at launch: the written data does not fit in L2
  uint32_t tokens_ahead;  // set at launch: how many tokens later rows are prefetched to L2; 0: none
};

struct BatchIndicesParams {
  const int32_t* append_indptr;  // [batch_size + 1]
  const int32_t* seq_lens;       // [batch_size], new tokens included
  int32_t* batch_indices;        // [num_tokens]; -1 for tokens without a request
  int32_t* positions;            // [num_tokens]; 0 for tokens without a request
  uint32_t batch_size;
  uint32_t num_tokens;
};

struct SeqLensParams {
  const int32_t* kv_indptr;         // [batch_size + 1]
  const int32_t* kv_last_page_len;  // [batch_size]
  int32_t* seq_lens;                // [batch_size]
  uint32_t batch_size;
  uint32_t page_size;
};

}  // namespace flashinfer
