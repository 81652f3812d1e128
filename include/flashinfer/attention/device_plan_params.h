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
  bool run_at_once;               // the GPU holds the CTAs of all columns
  WorkItem* items;                // num_columns + tiles; null, as merges, where nothing is written
  MergeItem* merges;

  // finish_device_plan() finds these.
  FastDivisor by_columns;  // num_columns
  int32_t plain_rows;      // of the one tile of each request, if it sees all its keys; else 0
  int32_t most_kv_len;     // with plain_rows: tokens that the pages of a request hold
};

// Finds what follows from the other fields. Most calls decode by a table of pages, without a
// window: little is then to be computed before the first key, which waits for it.
inline void finish_device_plan(DevicePlanParams& p) {
  p.by_columns = FastDivisor(p.num_columns > 1 ? p.num_columns : 1);
  const int64_t room = int64_t{p.pages_per_request} * p.page_size;
  p.most_kv_len = room < INT32_MAX ? static_cast<int32_t>(room) : INT32_MAX;
  const bool is_plain = p.qo_indptr == nullptr && p.kv_indptr == nullptr && p.kv_len != nullptr &&
                        p.window_left < 0 && p.tiles_per_request.divisor == 1 &&
                        p.qo_tokens >= int64_t{p.batch_size} * p.qo_len;
  p.plain_rows = is_plain ? p.qo_len * static_cast<int32_t>(p.group_size.divisor) : 0;
}

}  // namespace flashinfer
