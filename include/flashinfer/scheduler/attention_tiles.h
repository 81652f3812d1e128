// The tiles of an attention launch: their query rows, KV ranges and costs. Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>
#include <flashinfer/scheduler/plan_layout.h>
#include <flashinfer/scheduler/work.h>
#include <vector>

namespace flashinfer {

struct PlanRequest {
  int32_t qo_begin;  // first row in q [tokens]
  int32_t qo_len;    // [tokens]
  int32_t kv_base;   // paged: first entry in kv_indices; ragged: first row in k, v
  int32_t kv_len;    // [tokens]
};

// Requests that share tensors and mask.
struct RequestGroup {
  std::vector<PlanRequest> requests;
  bool causal;             // a key is visible up to the query's position, aligned to the end
  int64_t window_left;     // keys further back are not visible; negative: no limit
  int64_t qo_tokens = 0;   // rows of q
  int64_t kv_entries = 0;  // paged: entries of kv_indices; ragged: rows of k and v
  // Keys that a custom mask shows each row of q: a tile reads the range that its rows need. Null: a
  // query may see any key.
  const VisibleRange* visible = nullptr;

  PlannedGroup planned() const {
    return {static_cast<int64_t>(requests.size()), qo_tokens, kv_entries};
  }
};

// Everything besides the requests that a plan depends on. Python passes its bytes: every field is
// an int64_t, and flashinfer/_attention/plan/planner.py declares the same fields.
struct PlanConfig {
  int64_t num_kv_heads;
  int64_t group_size;  // query heads per KV head
  int64_t head_dim_vo;
  int64_t tile_q;         // packed rows of a tile of kind 0
  int64_t tile_q_second;  // packed rows of a tile of kind 1; 0: all tiles are of kind 0
  int64_t tile_kv;        // tokens, a power of two
  // Starting and ending a piece takes as long as this many KV tiles, since the pipeline fills and
  // drains.
  int64_t piece_tiles = 1;
  int64_t cta_slots;  // CTAs that the GPU holds at a time
  // How many times as fast a CTA runs alone on an SM, where CTAs wait for memory: with two CTAs per
  // SM, half of them read as much as all.
  int64_t lone_speed = 1;
  int64_t fixed_split_size;  // [tokens], a multiple of the KV tile; 0: the planner chooses
  int64_t disable_split_kv;  // 0 or 1
  int64_t graph_batch_size;  // capacity of a CUDA graph; negative: no graph
  int64_t graph_qo_tokens;
  int64_t graph_qo_len;  // most tokens of one request; 0: all of them
  // Range of packed rows of the requests to plan; another launch takes the others.
  int64_t least_rows = 0;
  int64_t most_rows = INT64_MAX;

  int tile_kv_log2() const { return __builtin_ctzll(tile_kv); }
  int64_t kv_tiles(int64_t tokens) const { return (tokens + tile_kv - 1) >> tile_kv_log2(); }
  // Whether CTAs take all lists of one head before those of the next (portable/attention.cuh, and
  // with many lists attention/sm90/launch.cuh), so that the longest lists do not come first.
  bool takes_heads_in_turn(int64_t lists) const {
    return piece_tiles == 1 ? tile_q > 16 : lists >= 8 * cta_slots;
  }
  // Whether the kernel can merge: that for decode, whose CTAs have all columns of a row. With a
  // fixed split size the order of adding must not depend on who merges.
  bool can_merge() const {
    return tile_q <= 16 && tile_q_second == 0 && fixed_split_size == 0 && head_dim_vo <= 256;
  }
  bool is_graph() const { return graph_batch_size >= 0; }
  bool takes(int64_t rows) const { return least_rows <= rows && rows <= most_rows; }
};

struct Tile {
  int32_t request;
  int32_t kind;
  int32_t row_begin;  // packed rows
  int32_t kv_begin;   // [tokens], a multiple of the KV tile; an empty range is 0 to 0
  int32_t kv_end;
  int64_t cost;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Time in sixteenths of what a tile of few rows takes for one KV tile, which is the time of its
// loads. Arithmetic on 128 rows takes about twice that, which matters if a second shape runs beside
// it.
class TileCost {
 public:
  explicit TileCost(const PlanConfig& config) : piece_tiles_(config.piece_tiles) {
    shift_[0] = config.tile_q >= 128 ? 5 : 4;
    shift_[1] = config.tile_q_second >= 128 ? 5 : 4;
  }
  int64_t per_kv_tile(int kind) const { return int64_t{1} << shift_[kind]; }
  int64_t per_piece(int kind) const { return piece_tiles_ << shift_[kind]; }
  int64_t of(int kind, int64_t kv_tiles) const { return (kv_tiles + piece_tiles_) << shift_[kind]; }
  // KV tiles that fit in a cost; negative if not even a piece without any fits.
  int64_t kv_tiles_for(int kind, int64_t cost) const {
    return (cost >> shift_[kind]) - piece_tiles_;
  }

 private:
  int64_t piece_tiles_;
  int shift_[2];
};

// Largest number of tiles of any requests within these limits.
inline int64_t max_tiles(const PlanConfig& config, int64_t batch_size, int64_t qo_tokens) {
  const int64_t tile_q =
      config.tile_q_second > 0 ? std::min(config.tile_q, config.tile_q_second) : config.tile_q;
  const int64_t rows = qo_tokens * config.group_size;
  return std::min(rows / tile_q + batch_size, rows);
}

struct TileTotals {
  int64_t cost = 0, most = 0, least = INT64_MAX;  // over all tiles, and of one tile
  int64_t most_of[2] = {};                        // largest cost of a tile, by kind
  double rows = 0;                                // over all tiles, rows times cost

  void add(int64_t tile_cost) {
    cost += tile_cost;
    most = std::max(most, tile_cost);
    least = std::min(least, tile_cost);
  }
};

// Token and head of a packed row; stepping from row to row needs no division.
struct PackedRow {
  int32_t token, head;

  static PackedRow of(int64_t row, int64_t group_size) {
    return {static_cast<int32_t>(row / group_size), static_cast<int32_t>(row % group_size)};
  }
  void move(PackedRow by, int32_t group_size) {
    head += by.head;
    token += by.token;
    if (head >= group_size) {
      head -= group_size;
      ++token;
    }
  }
};

// Smallest range with the keys of tokens first ... last.
inline VisibleRange common_range(const VisibleRange* ranges, int64_t first, int64_t last) {
  VisibleRange common = {INT32_MAX, 0};
  for (int64_t token = first; token <= last; ++token) {
    if (ranges[token].end == 0) continue;
    common.begin = std::min(common.begin, ranges[token].begin);
    common.end = std::max(common.end, ranges[token].end);
  }
  return common;
}

// Writes the tiles of a group after the first `num_before`, by request and by row, for the requests
// that the launch takes. A negative `group_kind` gives kind 1 to the requests that fit one tile of
// the second shape, if there is one.
inline void append_tiles(const PlanConfig& config, const RequestGroup& group, int group_kind,
                         size_t num_before, std::vector<Tile>& tiles, TileTotals& all_totals) {
  const TileCost cost(config);
  const int32_t group_size = static_cast<int32_t>(config.group_size);
  const int32_t batch_size = static_cast<int32_t>(group.requests.size());
  const int64_t tile_qs[2] = {config.tile_q, std::max<int64_t>(1, config.tile_q_second)};
  const auto kind_of = [&](int64_t rows) {
    return group_kind >= 0 ? group_kind : static_cast<int>(rows <= config.tile_q_second);
  };

  PackedRow steps[2], last_rows[2];  // from tile to tile, and of the first tile
  for (int kind = 0; kind < 2; ++kind) {
    steps[kind] = PackedRow::of(tile_qs[kind], group_size);
    last_rows[kind] = PackedRow::of(tile_qs[kind] - 1, group_size);
  }
  size_t count = 0;
  for (const PlanRequest& r : group.requests) {
    const int64_t rows = int64_t{r.qo_len} * group_size;
    const int64_t tile_q = tile_qs[kind_of(rows)];
    if (config.takes(rows)) count += rows > tile_q ? ceil_div(rows, tile_q) : rows > 0;
  }
  tiles.resize(num_before + count);  // elements of the last plan need no zeros
  Tile* tile = tiles.data() + num_before;

  // These are copies, since the compiler cannot know that writing tiles does not change them.
  const bool causal = group.causal;
  const int64_t window_left = group.window_left, tile_kv = config.tile_kv;
  const int tile_kv_log2 = config.tile_kv_log2();
  TileTotals totals = all_totals;
  for (int32_t request = 0; request < batch_size; ++request) {
    const PlanRequest r = group.requests[request];
    const int64_t rows = int64_t{r.qo_len} * group_size;
    if (!config.takes(rows)) continue;
    const int kind = kind_of(rows);
    const int64_t tile_q = tile_qs[kind];
    const PackedRow step = steps[kind];
    PackedRow first = {0, 0}, last = last_rows[kind];
    int64_t most = totals.most_of[kind];
    const int64_t before = totals.cost;
    const int64_t shift = int64_t{r.kv_len} - r.qo_len;
    for (int64_t row = 0; row < rows; row += tile_q) {
      int64_t kv_begin = 0, kv_end = r.kv_len;
      if (causal) {
        const int64_t last_token = std::min(last.token, r.qo_len - 1);
        kv_end = std::min(kv_end, last_token + shift + 1);
        last.move(step, group_size);
      }
      if (window_left >= 0) {
        kv_begin = std::max<int64_t>(0, first.token + shift - window_left) & -tile_kv;
        first.move(step, group_size);
      }
      if (group.visible != nullptr) {
        const int64_t last_token = std::min<int64_t>((row + tile_q - 1) / group_size, r.qo_len - 1);
        const VisibleRange seen =
            common_range(group.visible + r.qo_begin, row / group_size, last_token);
        kv_begin = std::max<int64_t>(kv_begin, seen.begin & -tile_kv);
        kv_end = std::min<int64_t>(kv_end, seen.end);
      }
      if (kv_begin >= kv_end) kv_begin = kv_end = 0;
      tile->request = request;
      tile->kind = kind;
      tile->row_begin = static_cast<int32_t>(row);
      tile->kv_begin = static_cast<int32_t>(kv_begin);
      tile->kv_end = static_cast<int32_t>(kv_end);
      tile->cost = cost.of(kind, (kv_end - kv_begin + tile_kv - 1) >> tile_kv_log2);
      totals.add(tile->cost);
      most = std::max(most, tile->cost);
      ++tile;
    }
    totals.most_of[kind] = most;
    totals.rows += static_cast<double>(std::min(rows, tile_q) * (totals.cost - before));
  }
  all_totals = totals;
}

}  // namespace flashinfer
