// Plans an attention launch: cuts tiles into work items, gives the items to CTA columns, and writes
// the work list of work.h. Plain C++; keeps its scratch memory, so that planning again allocates
// nothing.
//
// Four ways, of which the first that applies is taken:
//   fixed split size   every tile is cut at the multiples of the size, whatever else is planned:
//                      the result of a request does not depend on the rest of the batch;
//   splitting disabled no tile is cut;
//   whole tiles        no tile is cut, because longest-first scheduling is balanced as it is;
//   equal shares       all (tile, KV tile) pairs stand in a row that is cut into one share of equal
//                      cost per column. This is how few long requests fill the GPU.
// Uncut tiles and fixed pieces become one column each, longest first: the hardware hands CTAs out
// in order. A CUDA graph has a fixed number of columns; there they are dealt longest first, each to
// the least loaded column.
//
// Example and costs: docs/design/scheduler.md. Measurements: docs/tuning/kernel_choice.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <flashinfer/scheduler/attention_shares.h>
#include <flashinfer/scheduler/attention_tiles.h>
#include <flashinfer/scheduler/longest_first.h>
#include <flashinfer/scheduler/plan_layout.h>
#include <flashinfer/scheduler/work.h>
#include <vector>

namespace flashinfer {

class AttentionPlanner {
 public:
  // Limit for tiles and for work items: 192 MiB of items.
  static constexpr int64_t kMaxPieces = 1 << 22;

  // Decides the plan. `float_bytes` is the size of the float workspace, which gives a graph with a
  // fixed split size its number of slots; if negative, there are as many slots as the plan needs.
  // The lengths of all requests times group_size must be below 2^31, and the groups must fit the
  // graph's capacity. Returns false if the plan would have more than kMaxPieces pieces.
  bool plan(const PlanConfig& config, const RequestGroup& first, const RequestGroup* second,
            int64_t float_bytes) {
    config_ = &config;
    groups_[0] = &first;
    groups_[1] = second;
    pieces_.clear();
    sorted_.clear();
    totals_ = {};
    append_tiles(config, first, second ? 0 : -1, 0, tiles_, totals_);
    if (second) append_tiles(config, *second, 1, tiles_.size(), tiles_, totals_);
    num_slots_ = num_merges_ = max_cut_rows_ = num_columns_ = 0;
    gpu_columns_ = EqualShares::gpu_columns(config);
    shares_ = EqualShares(config, totals_, static_cast<int64_t>(tiles_.size()));
    share_columns_ = shares_.columns();

    are_whole_ = false;
    if (config.fixed_split_size > 0) {
      cut_at_multiples();
      deal_longest_first(pieces_);
    } else if (config.disable_split_kv || whole_tiles_are_balanced()) {
      are_whole_ = true;
      deal_longest_first(tiles_);
    } else {
      share_columns_ = columns_of_shares();
      cut_into_shares(smallest_share());
    }
    decide_layout(float_bytes);
    return num_pieces() <= kMaxPieces;
  }

  // Writes the decided plan, layout().used_bytes bytes.
  void write(void* buffer) {
    char* bytes = static_cast<char*>(buffer);
    write_items(reinterpret_cast<WorkItem*>(bytes + layout_.items_offset));
    write_merges(reinterpret_cast<MergeItem*>(bytes + layout_.merges_offset));
    if (layout_.counters_offset < 0) return;
    std::fill_n(reinterpret_cast<uint32_t*>(bytes + layout_.counters_offset), num_counters(), 0u);
  }

  const PlanLayout& layout() const { return layout_; }

 private:
  static constexpr int64_t kSumsBytes = 8;  // softmax sums of a slot's row

  struct Piece {
    int32_t tile;
    int32_t kv_begin;
    int32_t kv_end;
    int32_t slot;    // negative: the tile is not split
    int32_t column;  // for equal shares
    int64_t cost;
    int32_t merge = 0;  // of a split tile
  };
  bool is_cut(const Tile& tile, const Piece& piece) const {
    return piece.kv_begin != tile.kv_begin || piece.kv_end != tile.kv_end;
  }

  int64_t tile_rows(const Tile& tile) const {
    const int64_t rows =
        groups_[group_of(tile)]->requests[tile.request].qo_len * config_->group_size;
    return std::min(rows - tile.row_begin, tile.kind ? config_->tile_q_second : config_->tile_q);
  }

  // Without a second group, tiles of both kinds belong to the first group.
  int group_of(const Tile& tile) const { return groups_[1] ? tile.kind : 0; }

  // ---- Cutting ----

  // Splits at multiples of the size in the request's own positions, so that neither the query's
  // position nor the window moves the cuts.
  void cut_at_multiples() {
    const TileCost cost(*config_);
    const int64_t size = config_->fixed_split_size;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      const Tile& tile = tiles_[i];
      int64_t begin = tile.kv_begin;
      do {
        const int64_t end = std::min<int64_t>(tile.kv_end, (begin / size + 1) * size);
        pieces_.push_back({static_cast<int32_t>(i), static_cast<int32_t>(begin),
                           static_cast<int32_t>(end), -1, 0,
                           cost.of(tile.kind, config_->kv_tiles(end - begin))});
        begin = end;
        if (static_cast<int64_t>(pieces_.size()) > kMaxPieces) return;
      } while (begin < tile.kv_end);
    }
    number_slots();
  }

  // Walks over all tiles in order and closes a column when its cost reaches `share`. Returns the
  // number of columns, or INT64_MAX if the share is too small for a part of a tile. No part of a
  // split tile is shorter than min_piece. With kRecord it records the pieces; the columns must then
  // suffice.
  template <bool kRecord>
  int64_t walk(int64_t share) {
    const TileCost cost(*config_);
    int64_t column = 0, room = share;
    const int32_t num_tiles = static_cast<int32_t>(tiles_.size());
    if constexpr (kRecord) pieces_.resize(num_tiles + gpu_columns_);  // each border splits one tile
    Piece* next = pieces_.data();
    const auto record = [&](int32_t tile, int64_t begin, int64_t end, int64_t piece_cost) {
      if constexpr (kRecord) {
        *next++ = {tile, static_cast<int32_t>(begin),  static_cast<int32_t>(end),
                   -1,   static_cast<int32_t>(column), piece_cost};
      }
    };
    for (int32_t i = 0; i < num_tiles; ++i) {
      const Tile& tile = tiles_[i];
      if (tile.cost <= room) {
        record(i, tile.kv_begin, tile.kv_end, tile.cost);
        room -= tile.cost;
        continue;
      }
      const int kind = tile.kind;
      const int64_t min_piece = shares_.min_piece();
      int64_t begin = tile.kv_begin, left = config_->kv_tiles(tile.kv_end - begin);
      while (cost.of(kind, left) > room) {
        const int64_t take = std::min(cost.kv_tiles_for(kind, room), left - min_piece);
        if (take >= min_piece) {
          const int64_t end = begin + (take << config_->tile_kv_log2());
          record(i, begin, end, cost.of(kind, take));
          begin = end;
          left -= take;
        } else if (room == share) {
          return INT64_MAX;
        }
        ++column;
        room = share;
      }
      record(i, begin, tile.kv_end, cost.of(kind, left));
      room -= cost.of(kind, left);
    }
    if constexpr (kRecord) pieces_.resize(next - pieces_.data());
    walked_cost_ = column * share + share - room;
    return column + 1;
  }

  // If there are few tiles of equal cost, each is split into the same number of parts where that
  // leaves hardly a column empty: 16 tiles take 32 of 33 columns, two each, rather than two or
  // three each. Long tiles take the fewest columns that keep the memory busy, which leaves less to
  // merge.
  int64_t columns_of_shares() const {
    const int64_t all = shares_.columns();
    const int64_t num_tiles = static_cast<int64_t>(tiles_.size());
    if (totals_.least != totals_.most || num_tiles > all) return all;
    const bool is_long = totals_.cost >= all * TileCost(*config_).of(0, 24);
    const int64_t most = is_long ? all / config_->lone_speed : all;
    const int64_t columns = most / num_tiles * num_tiles;
    return 32 * columns >= 31 * most && columns > 0 ? columns : all;
  }

  // Finds the smallest share, to about 1/256, for which the GPU's columns suffice. All costs are
  // multiples of one unit, so only such multiples are tried.
  int64_t smallest_share() {
    const TileCost cost(*config_);
    const int64_t unit = config_->tile_q_second > 0
                             ? std::min(cost.per_kv_tile(0), cost.per_kv_tile(1))
                             : cost.per_kv_tile(0);
    const int64_t lowest = std::max(shares_.least_share(), ceil_div(totals_.cost, share_columns_));
    int64_t low = ceil_div(lowest, unit) - 1;  // too small; in units, like `high`
    int64_t high = std::max(low + 1, ceil_div(shares_.share(), unit));
    int64_t step = std::max<int64_t>(1, high / 64);
    while (!is_enough(high * unit)) {
      low = high;
      high += step;
      step *= 2;
    }
    // The cost of splitting hardly depends on the share. What the columns held in the last walk
    // tells where the search will probably end, and two guesses spare most of the bisection.
    const int64_t likely = ceil_div(walked_cost_, share_columns_ * unit);
    const int64_t margin = high / 512;
    for (const int64_t guess : {likely + margin, likely - margin - 1}) {
      if (low < guess && guess < high) (is_enough(guess * unit) ? high : low) = guess;
    }
    while (high - low > std::max<int64_t>(1, high / 256)) {
      const int64_t middle = low + (high - low) / 2;
      (is_enough(middle * unit) ? high : low) = middle;
    }
    return high * unit;
  }

  bool is_enough(int64_t share) { return walk<false>(share) <= share_columns_; }

  void cut_into_shares(int64_t share) {
    num_columns_ = walk<true>(share);
    number_slots();
  }

  // Numbers the parts of each split tile consecutively, in order of KV.
  void number_slots() {
    for (Piece& piece : pieces_) {
      const Tile& tile = tiles_[piece.tile];
      if (!is_cut(tile, piece)) continue;
      piece.slot = static_cast<int32_t>(num_slots_++);
      if (piece.kv_begin == tile.kv_begin) {
        ++num_merges_;
        max_cut_rows_ = std::max(max_cut_rows_, tile_rows(tile));
      }
      piece.merge = static_cast<int32_t>(num_merges_ - 1);
    }
  }

  // ---- Whole tiles, longest first ----

  // Whether whole tiles end at most 1/32 later than equal shares.
  bool whole_tiles_are_balanced() {
    const int64_t num_tiles = static_cast<int64_t>(tiles_.size());
    if (num_tiles == 0) return true;
    const int64_t columns = shares_.columns(), waves = shares_.waves();
    const int64_t heads = config_->num_kv_heads, lists = num_tiles * heads;
    const int64_t dealt = config_->is_graph() ? gpu_columns_ * heads : config_->cta_slots;
    const int64_t slots = std::min(config_->cta_slots, dealt);
    const int64_t allowed = shares_.end() + shares_.end() / 32;
    const int64_t even = waves * ceil_div(totals_.cost, columns);
    if (totals_.most > allowed * config_->lone_speed) return false;
    if (totals_.least == totals_.most) {
      return lists / slots * totals_.most + time_of(totals_.most, lists % slots, slots) <= allowed;
    }
    if (lists <= slots && totals_.most <= allowed) return true;
    if (even + totals_.most <= allowed) return true;
    // If the kernel takes head after head, the longest tile of the last head begins when the others
    // are done. Each head's tiles are then dealt to as many columns as run at a time.
    const bool is_late =
        config_->takes_heads_in_turn(lists) && even - even / heads + totals_.most > allowed;
    // With so many tiles the short ones at the end fill every gap, and dealing them out takes long.
    if (num_tiles >= 32 * columns && totals_.most <= even && !is_late) return true;
    sorted_.sort(tiles_, totals_.least, totals_.most);
    if (waves * sorted_.deal(tiles_, columns) <= allowed || waves * end_of_columns() <= allowed) {
      if (!config_->is_graph() && !is_late) sorted_.forget_columns();
      return true;
    }
    sorted_.clear();
    return false;
  }

  // Time that `running` of `all` resident columns take for `cost` each while no other column runs.
  int64_t time_of(int64_t cost, int64_t running, int64_t all) const {
    if (running == 0) return 0;
    const int64_t speed = config_->lone_speed;
    return ceil_div(cost * std::max(all, speed * running), speed * all);
  }

  // Returns when the last of the dealt columns ends.
  int64_t end_of_columns() {
    const int64_t columns = shares_.columns();
    int64_t end = 0, done = 0;  // done: cost of the columns that have ended
    int64_t running = std::min<int64_t>(tiles_.size(), columns);
    sorted_.visit_loads([&](int64_t cost) {
      end += time_of(cost - done, running--, columns);
      done = cost;
    });
    return end;
  }

  template <typename Part>
  void deal_longest_first(const std::vector<Part>& parts) {
    if (parts.empty()) return;
    if (!sorted_.is_sorted()) {
      TileTotals totals;
      for (const Part& part : parts) totals.add(part.cost);
      sorted_.sort(parts, totals.least, totals.most);
    }
    const int64_t num_parts = static_cast<int64_t>(parts.size());
    if (!config_->is_graph()) {
      const int64_t columns = sorted_.is_dealt() ? shares_.columns() : EqualShares::kMaxColumns;
      num_columns_ = std::min(num_parts, columns);
    } else if (!sorted_.is_dealt()) {
      sorted_.deal(parts, gpu_columns_);
    }
  }

  // ---- Layout and writing ----

  void decide_layout(int64_t float_bytes) {
    PlanLayout& layout = layout_ = {};
    layout.tile_q = config_->tile_q;
    for (int i = 0; i < 2 && groups_[i]; ++i) layout.groups[i] = groups_[i]->planned();
    layout.num_ctas = num_columns_;
    layout.num_merges = num_merges_;
    layout.rows_per_slot = max_cut_rows_;
    layout.num_slots = num_slots_;
    int64_t used_items = num_pieces(), max_items = used_items;
    if (config_->is_graph()) {
      used_items += gpu_columns_;  // an empty column still has its first item
      max_items = std::max(used_items, reserve_for_graph(float_bytes));
    }
    layout.merged_rows = merged_rows();
    layout.merges_offset = 0;
    const int64_t merges_end = layout.num_merges * sizeof(MergeItem);
    layout.counters_offset = kernel_merges() ? merges_end : -1;
    layout.items_offset = ceil_div(merges_end + num_counters() * sizeof(uint32_t), 128) * 128;
    layout.int_bytes = layout.items_offset + max_items * sizeof(WorkItem);
    layout.used_bytes = layout.items_offset + used_items * sizeof(WorkItem);
    layout.sums_offset = sums_offset(layout.num_slots);
    layout.float_bytes = layout.sums_offset + layout.num_slots * slot_rows() * kSumsBytes;
  }

  // A CTA merges few parts sooner than a kernel that waits for all CTAs, many later.
  bool kernel_merges() const {
    constexpr int64_t kMostParts = 4;  // on average
    return config_->can_merge() && layout_.num_merges > 0 &&
           layout_.num_slots <= kMostParts * layout_.num_merges;
  }
  int64_t num_counters() const {
    return layout_.counters_offset < 0 ? 0 : layout_.num_merges * config_->num_kv_heads;
  }

  int64_t num_pieces() const { return are_whole_ ? tiles_.size() : pieces_.size(); }

  // Rows per CTA of the merge: one while all these CTAs run at a time, since eight warps then share
  // the parts; otherwise four, since each CTA costs more than its few parts. The number of warps
  // per row decides the order in which parts are added, so with a fixed split size it must not
  // depend on the batch.
  int64_t merged_rows() const {
    const int64_t rows = layout_.rows_per_slot;
    const bool at_a_time = layout_.num_merges * config_->num_kv_heads * rows <= 64;
    return config_->fixed_split_size > 0 || at_a_time ? 1 : std::min<int64_t>(rows, 4);
  }

  // Sizes of a captured launch and its kernel arguments must be the same for every batch within the
  // capacity. Returns the largest possible number of items. With a fixed split size only the
  // workspaces limit it: merges come first, items take the rest, and there are as many slots as
  // fit.
  int64_t reserve_for_graph(int64_t float_bytes) {
    PlanLayout& layout = layout_;
    int64_t tiles = max_tiles(*config_, config_->graph_batch_size, config_->graph_qo_tokens);
    if (config_->graph_qo_len > 0) {
      const int64_t each = max_tiles(*config_, 1, config_->graph_qo_len);
      tiles = std::min(tiles, config_->graph_batch_size * each);
    }
    const int64_t longest =
        config_->graph_qo_len > 0 ? config_->graph_qo_len : config_->graph_qo_tokens;
    const int64_t rows = std::max<int64_t>(1, longest * config_->group_size);
    layout.num_ctas = gpu_columns_;
    layout.rows_per_slot = std::min(rows, std::max(config_->tile_q, config_->tile_q_second));
    if (config_->fixed_split_size > 0) {
      layout.num_merges = tiles;
      int64_t slots = float_bytes / (sums_offset(256) / 256 + slot_rows() * kSumsBytes);
      while (slots > 0 && sums_offset(slots) + slots * slot_rows() * kSumsBytes > float_bytes)
        --slots;
      layout.num_slots = std::max(num_slots_, slots);
      return 0;
    }
    const int64_t cuts = config_->disable_split_kv ? 0 : gpu_columns_ - 1;
    layout.num_merges = std::min(cuts, tiles);
    layout.num_slots = cuts + layout.num_merges;  // a tile of n parts has n - 1 cuts
    return tiles + cuts + gpu_columns_;
  }

  int64_t slot_rows() const { return config_->num_kv_heads * layout_.rows_per_slot; }
  int64_t sums_offset(int64_t slots) const {
    return ceil_div(slots * slot_rows() * config_->head_dim_vo * 4, 256) * 256;
  }

  // Writes the first item of column c to items[c]; later items of a column follow after all first
  // items, in the order in which they are dealt.
  void write_items(WorkItem* items) {
    last_of_column_.assign(layout_.num_ctas, -1);
    num_written_ = static_cast<int32_t>(layout_.num_ctas);
    if (are_whole_) {
      write_sorted(tiles_, items);
    } else if (sorted_.is_sorted()) {
      write_sorted(pieces_, items);
    } else {
      for (const Piece& piece : pieces_) write_item(piece, next_item(items, piece.column));
    }
    for (int64_t column = 0; column < layout_.num_ctas; ++column) {
      if (last_of_column_[column] < 0) {
        items[column] = WorkItem{};
        items[column].request = items[column].partial_slot = items[column].next = -1;
      }
    }
  }

  template <typename Part>
  void write_sorted(const std::vector<Part>& parts, WorkItem* items) {
    const bool is_dealt = sorted_.is_dealt();
    int32_t column = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[sorted_.part(i)];
      write_item(part, next_item(items, is_dealt ? sorted_.column(i) : column));
      if (++column == layout_.num_ctas) column = 0;
    }
  }

  WorkItem& next_item(WorkItem* items, int32_t column) {
    int32_t& last = last_of_column_[column];
    const int32_t index = last < 0 ? column : num_written_++;
    if (last >= 0) items[last].next = index;
    last = index;
    return items[index];
  }

  void write_item(const Tile& tile, WorkItem& item) const {
    write_item(tile, tile.kv_begin, tile.kv_end, -1, 0, item);
  }
  void write_item(const Piece& piece, WorkItem& item) const {
    const int32_t merge = layout_.counters_offset < 0 ? 0 : piece.merge;
    write_item(tiles_[piece.tile], piece.kv_begin, piece.kv_end, piece.slot, merge, item);
  }
  void write_item(const Tile& tile, int32_t kv_begin, int32_t kv_end, int32_t slot, int32_t merge,
                  WorkItem& item) const {
    const PlanRequest& request = groups_[group_of(tile)]->requests[tile.request];
    item.request = tile.request;
    item.kind = tile.kind;
    item.qo_begin = request.qo_begin;
    item.qo_len = request.qo_len;
    item.kv_len = request.kv_len;
    item.kv_base = request.kv_base;
    item.row_begin = tile.row_begin;
    item.kv_begin = kv_begin;
    item.kv_end = kv_end;
    item.partial_slot = slot;
    item.next = -1;
    item.merge_or_taken = merge;
  }

  // Writes the merges in order of the tiles. Merges of a graph that this plan does not need have no
  // rows.
  void write_merges(MergeItem* merges) {
    MergeItem* merge = merges;
    for (const Piece& piece : pieces_) {
      if (piece.slot < 0) continue;
      const Tile& tile = tiles_[piece.tile];
      if (piece.kv_begin == tile.kv_begin) {
        const PlanRequest& request = groups_[group_of(tile)]->requests[tile.request];
        *merge = MergeItem{};
        merge->kv_len = request.kv_len;
        merge->kind = tile.kind;
        merge->request = tile.request;
        merge->qo_begin = request.qo_begin;
        merge->qo_len = request.qo_len;
        merge->row_begin = tile.row_begin;
        merge->num_rows = static_cast<int32_t>(tile_rows(tile));
        merge->slot_begin = piece.slot;
        if (config_->fixed_split_size > 0) {
          merge->first_part = static_cast<int32_t>(tile.kv_begin / config_->fixed_split_size);
        }
      }
      if (piece.kv_end == tile.kv_end) (merge++)->slot_end = piece.slot + 1;
    }
    std::fill(merge, merges + layout_.num_merges, MergeItem{});
  }

  const PlanConfig* config_ = nullptr;
  const RequestGroup* groups_[2] = {};
  int64_t gpu_columns_ = 0;  // columns of a graph
  EqualShares shares_;
  int64_t share_columns_ = 0;  // columns that take shares
  int64_t walked_cost_ = 0;    // cost of the latest walk, including what closed columns left empty
  int64_t num_columns_ = 0, num_slots_ = 0, num_merges_ = 0, max_cut_rows_ = 0;
  PlanLayout layout_ = {};

  std::vector<Tile> tiles_;
  TileTotals totals_;
  bool are_whole_ = false;               // no tile is split, and there are no pieces
  std::vector<Piece> pieces_;            // by tile, then by KV
  LongestFirst sorted_;                  // sorts whole tiles, or pieces of a fixed size
  std::vector<int32_t> last_of_column_;  // last item of each column while items are written
  int32_t num_written_ = 0;              // items written, including first items still to come
};

}  // namespace flashinfer
