// The work list of an attention launch: a plan writes it and the kernels read it. Plain C++.
//
// A tile is `tile_q` consecutive packed query rows of one request; packed row = token * group_size
// + head of the group, so that one K/V tile serves the whole GQA group. A work item is one tile
// against one range of KV tokens. There are num_ctas lists: list c is items[c], then
// items[items[c].next], and so on. For each KV head one CTA walks each list.
//
// A tile whose KV range was split writes its parts to the workspace: slot s of KV head h holds
// rows_per_slot rows of fp32 output and their softmax sums. A MergeItem names the slots to merge,
// in order of KV. A kernel of its own merges, or the CTA that writes the last part: there are
// counters then, one for each merge and KV head, 0 between launches.
#pragma once

#include <cstdint>

namespace flashinfer {

struct alignas(16) WorkItem {
  int32_t request;    // negative: the CTA has nothing to do
  int32_t kind;       // tile shape of the launch: 0 the first, 1 the second
  int32_t qo_begin;   // first row of the request in q and o [tokens]
  int32_t qo_len;     // [tokens]
  int32_t kv_len;     // [tokens]
  int32_t kv_base;    // paged: first entry of the request in kv_indices; ragged: first row in k, v
  int32_t row_begin;  // first packed row of the tile
  int32_t kv_begin;   // [tokens]; the range is empty where nothing is visible
  int32_t kv_end;     // [tokens]
  int32_t partial_slot;  // negative: write o itself
  int32_t next;          // index of the CTA's next item; negative: none
  // A split tile's number among the merges, if the kernel merges. Or, in items[0] of launches whose
  // CTAs take lists dynamically, the number of lists taken so far; it is 0 between launches.
  int32_t merge_or_taken;
};
static_assert(sizeof(WorkItem) == 48, "three 16-byte loads");

struct alignas(16) MergeItem {
  int32_t kind;
  int32_t request;
  int32_t qo_begin;    // first row of the request in o [tokens]
  int32_t qo_len;      // [tokens]
  int32_t row_begin;   // first packed row of the tile
  int32_t num_rows;    // packed rows; 0: nothing to merge
  int32_t slot_begin;  // parts slot_begin ... slot_end - 1, in order of KV
  int32_t slot_end;
  int32_t kv_len;      // [tokens]
  int32_t first_part;  // with a fixed split size the number of the first part in its request
  int32_t reserved[2];
};
static_assert(sizeof(MergeItem) == 48, "three 16-byte loads");

// Keys begin ... end - 1, which hold all that a query sees by a custom mask; both are 0 if it sees
// none.
struct VisibleRange {
  int32_t begin, end;
};

}  // namespace flashinfer
