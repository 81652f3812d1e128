// Arguments of plans that are made on the device (tile_row.cuh). Plain C++.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>
#include <flashinfer/scheduler/work.h>

namespace flashinfer {

// Requests by lengths in device memory, and where their work list goes. What the lengths say is cut
// to the bounds that are given here, so that no value of them leads a kernel out of its tensors.
struct DevicePlanParams {
  const int32_t* qo_indptr;      // [batch_size + 1] rows of q; null: qo_len each
  const int32_t* kv_indptr;      // [batch_size + 1] in page numbers; null: pages_per_request each
  const int32_t* kv_len;         // [batch_size] tokens; null: all pages up to last_page_len
  const int32_t* last_page_len;  // [batch_size] tokens in the last page; null with kv_len
  int32_t batch_size;
  int32_t qo_len;             // of each request, or the most of any
  int32_t qo_tokens;          // rows of q
  int32_t kv_entries;         // page numbers
  int32_t pages_per_request;  // read without kv_indptr
  int32_t page_size;          // [tokens]
  int32_t window_left;        // negative: no window
  bool causal;
  FastDivisor group_size;
  FastDivisor tiles_per_request;  // of qo_len tokens
  int32_t tile_q;                 // packed rows
  int32_t num_columns;            // lists of items
  int32_t num_merges;             // capacity, at least min(num_columns - 1, tiles)
  WorkItem* items;                // num_columns + tiles; null, as merges, where nothing is written
  MergeItem* merges;
};

}  // namespace flashinfer
