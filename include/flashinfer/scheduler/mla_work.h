// The work list of an MLA launch: what a plan writes and the kernels read. Plain C++.
//
// All heads of a token share one KV row, so the query rows of a request are packed: row = token *
// num_heads + head. A tile is 64 consecutive rows. A work item is one tile against one range of KV
// tokens; CTA c takes the items cta_begin[c] ... cta_begin[c + 1] - 1 in order.
//
// A tile whose KV range was cut writes each part to a slot of 64 rows of output and LSE, and
// an MlaMerge names its slots, in order of KV.
#pragma once

#include <cstdint>

namespace flashinfer {

struct alignas(16) MlaWorkItem {
  int32_t qo_begin;   // first row of the request in q and o [tokens]
  int32_t qo_len;     // [tokens]
  int32_t kv_base;    // first entry of the request in kv_indices
  int32_t kv_len;     // [tokens]
  int32_t row_begin;  // first packed row of the tile
  int32_t kv_begin;   // [tokens]; the range is empty where nothing is visible
  int32_t kv_end;     // [tokens]
  int16_t slot;       // of the workspace; negative: write o itself
  int16_t merge;      // of the parts of which the slot has one
};
static_assert(sizeof(MlaWorkItem) == 32, "two 16-byte loads");

struct alignas(16) MlaMerge {
  int32_t qo_begin;
  int32_t qo_len;
  int32_t row_begin;
  int32_t slot_begin;  // part i is in slot slot_begin + i * slot_stride
  int32_t num_parts;
  int32_t slot_stride;
  int32_t reserved[2];
};
static_assert(sizeof(MlaMerge) == 32, "two 16-byte loads");

// CTAs that merge parts themselves count here, for each merge. A plan begins with zeros, and a
// launch leaves zeros.
struct MlaMergeCounters {
  uint32_t started;  // CTAs that will bring a part
  uint32_t parts;    // that are there, and who waits for the others
};

// The int workspace: this header, then cta_begin, merges, counters and items. Only the items'
// number depends on the batch, so that a captured launch replays any plan that fits the workspace.
struct MlaPlanHeader {
  int32_t num_merges;
  int32_t num_items;
  int32_t reserved[2];
};

struct MlaPlanLayout {
  int64_t cta_begin_offset, merges_offset, counters_offset, items_offset;  // [bytes]

  explicit MlaPlanLayout(int64_t num_ctas) {
    const auto aligned = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    cta_begin_offset = aligned(sizeof(MlaPlanHeader));
    merges_offset = aligned(cta_begin_offset + (num_ctas + 1) * sizeof(int32_t));
    counters_offset = aligned(merges_offset + num_ctas * sizeof(MlaMerge));
    items_offset = aligned(counters_offset + num_ctas * sizeof(MlaMergeCounters));
  }
};

// Packed query rows of a tile.
inline constexpr int64_t kMlaTileRows = 64;

// Parts of a tile that a CTA merges beside its items, at most.
inline constexpr int32_t kMlaFewParts = 4;

// Rows that the kernels for few rows have at once.
inline constexpr int64_t kMlaFewRows = 16;

// Tiles of one request that neighbouring CTAs take side by side, at most.
inline constexpr int64_t kMlaMaxLanes = 4;

// Parts' LSEs lie at the front of the float workspace, as long as a plan's can be, then their
// outputs.
inline int64_t mla_most_slots(int64_t num_ctas) { return 2 * num_ctas + 2 * kMlaMaxLanes; }

inline int64_t mla_float_bytes(int64_t num_ctas, int64_t num_slots, int64_t head_dim_ckv) {
  return (4 * mla_most_slots(num_ctas) + 2 * num_slots * head_dim_ckv) * kMlaTileRows;
}

// Everything besides the list that a launch needs of its plan.
struct MlaPlan {
  int64_t num_ctas;     // 0: there is no plan
  int64_t num_tokens;   // that q must have
  int64_t num_indices;  // that kv_indices must have
  int64_t num_items, num_merges, num_slots;
  int64_t int_bytes, float_bytes;  // that the workspaces must have
  int32_t num_heads, page_size;
  bool causal;
  bool merges;          // whether there may be something to merge
  bool made_on_device;  // by the launch before, or by each CTA for itself
  bool few_parts;       // whether no tile has more than kMlaFewParts, for certain
  // Whether CTAs 2 i and 2 i + 1 have the two parts of tile i as their only items, for all tiles,
  // which have at most kMlaFewRows rows.
  bool in_pairs;
};

}  // namespace flashinfer
