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
#pragma once

#include <algorithm>
#include <cstdint>
#include <flashinfer/scheduler/attention_tiles.h>
#include <flashinfer/scheduler/work.h>
#include <functional>
#include <vector>

namespace flashinfer {

// What is written where. Offsets and sizes in bytes.
struct PlanLayout {
  int64_t num_ctas;  // columns; 0: nothing to do
  int64_t num_merges;
  int64_t rows_per_slot;
  int64_t merged_rows;  // by one CTA of the merge
  int64_t num_slots;
  int64_t merges_offset;  // in the int workspace
  int64_t items_offset;
  int64_t int_bytes;    // that the int workspace must have
  int64_t used_bytes;   // that this plan writes
  int64_t sums_offset;  // in the float workspace, of two floats per row; partial outputs are at 0
  int64_t float_bytes;
  bool is_too_long;  // more than kMaxPieces pieces: there is no plan
};

class AttentionPlanner {
 public:
  // Of tiles, and of work items: 192 MiB of items.
  static constexpr int64_t kMaxPieces = 1 << 22;

  // Decides. `float_bytes`: size of the float workspace, from which a graph with fixed split size
  // gets its number of slots; negative: as many as this plan needs.
  // The lengths of all requests times group_size must be below 2^31, the groups within the graph's
  // capacity.
  const PlanLayout& plan(const PlanConfig& config, const RequestGroup& first,
                         const RequestGroup* second, int64_t float_bytes) {
    config_ = &config;
    groups_[0] = &first;
    groups_[1] = second;
    tiles_.clear();
    pieces_.clear();
    order_.clear();
    append_tiles(config, first, second ? 0 : -1, tiles_);
    if (second) append_tiles(config, *second, 1, tiles_);
    total_cost_ = max_cost_ = 0;
    min_cost_ = INT64_MAX;
    for (const Tile& tile : tiles_) {
      total_cost_ += tile.cost;
      max_cost_ = std::max(max_cost_, tile.cost);
      min_cost_ = std::min(min_cost_, tile.cost);
    }
    num_slots_ = num_merges_ = max_cut_rows_ = num_columns_ = 0;
    gpu_columns_ = share_columns_ = gpu_columns(config);

    if (config.fixed_split_size > 0) {
      cut_at_multiples();
      deal_longest_first();
    } else if (config.disable_split_kv || whole_tiles_are_balanced()) {
      if (order_.empty()) take_whole_tiles();
      deal_longest_first();
    } else {
      share_columns_ = columns_of_shares();
      cut_into_shares(smallest_share());
    }
    decide_layout(float_bytes);
    return layout_;
  }

  // Writes the decided plan, layout().used_bytes bytes.
  void write(void* buffer) {
    char* bytes = static_cast<char*>(buffer);
    write_items(reinterpret_cast<WorkItem*>(bytes + layout_.items_offset));
    write_merges(reinterpret_cast<MergeItem*>(bytes + layout_.merges_offset));
  }

  const PlanLayout& layout() const { return layout_; }

  // Columns of which the GPU holds all at a time, or a few times that where it is not a multiple of
  // the heads: of the first four multiples, the first that leaves less than 3 % of the CTA slots
  // empty, else the best.
  static int64_t gpu_columns(const PlanConfig& config) {
    int64_t best = 1;
    double best_use = 0;
    for (int64_t waves = 1; waves <= 4; ++waves) {
      const int64_t slots = waves * config.cta_slots;
      const int64_t columns = slots / config.num_kv_heads;
      const double use = static_cast<double>(columns * config.num_kv_heads) / slots;
      if (columns >= 1 && columns <= kMaxColumns && use > best_use + 1e-9) {
        best = columns;
        best_use = use;
      }
      if (best_use > 0.97) break;
    }
    return best;
  }

 private:
  static constexpr int64_t kMaxColumns = 32767;  // times 65535 heads, a grid is below 2^31
  static constexpr int64_t kSumsBytes = 8;       // of a row of a slot, besides its output

  struct Piece {
    int32_t tile;
    int32_t kv_begin;
    int32_t kv_end;
    int32_t slot;  // negative: the tile is not cut
    int32_t column;
    int64_t cost;
  };
  // A column and its cost so far in one number, which orders columns by cost, then by index. Costs
  // are multiples of 16, and those of a plan add up to less than 2^52; indices are below 2^15.
  static uint64_t load_of(int64_t cost, int64_t column) {
    return static_cast<uint64_t>(cost << 11 | column);
  }
  static int64_t cost_of(uint64_t load) { return static_cast<int64_t>(load >> 15 << 4); }
  static int32_t column_of(uint64_t load) { return static_cast<int32_t>(load & 0x7fff); }

  bool is_cut(const Tile& tile, const Piece& piece) const {
    return piece.kv_begin != tile.kv_begin || piece.kv_end != tile.kv_end;
  }

  int64_t tile_rows(const Tile& tile) const {
    const int64_t rows =
        groups_[group_of(tile)]->requests[tile.request].qo_len * config_->group_size;
    return std::min(rows - tile.row_begin, tile.kind ? config_->tile_q_second : config_->tile_q);
  }

  // Without a second group both kinds are requests of the first.
  int group_of(const Tile& tile) const { return groups_[1] ? tile.kind : 0; }

  // ---- Cutting ----

  void add_piece(int32_t tile, int64_t kv_begin, int64_t kv_end, int64_t column, int64_t cost) {
    pieces_.push_back({tile, static_cast<int32_t>(kv_begin), static_cast<int32_t>(kv_end), -1,
                       static_cast<int32_t>(column), cost});
  }

  void take_whole_tiles() {
    pieces_.reserve(tiles_.size());
    for (size_t i = 0; i < tiles_.size(); ++i) {
      const Tile& tile = tiles_[i];
      add_piece(static_cast<int32_t>(i), tile.kv_begin, tile.kv_end, 0, tile.cost);
    }
  }

  // Cuts are multiples of the size in the request's own positions, so that neither the query's
  // position nor the window moves them.
  void cut_at_multiples() {
    const TileCost cost(*config_);
    const int64_t size = config_->fixed_split_size;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      const Tile& tile = tiles_[i];
      int64_t begin = tile.kv_begin;
      do {
        const int64_t end = std::min<int64_t>(tile.kv_end, (begin / size + 1) * size);
        add_piece(static_cast<int32_t>(i), begin, end, 0,
                  cost.of(tile.kind, config_->kv_tiles(end - begin)));
        begin = end;
        if (static_cast<int64_t>(pieces_.size()) > kMaxPieces) return;
      } while (begin < tile.kv_end);
    }
    number_slots();
  }

  // Walks all tiles in order and closes a column when its cost reaches `share`. Returns the number
  // of columns. No part of a cut tile is shorter than min_piece. Records the pieces for a share
  // with which the columns of the GPU suffice.
  template <bool kRecord>
  int64_t walk(int64_t share) {
    const TileCost cost(*config_);
    int64_t column = 0, room = share;
    const int32_t num_tiles = static_cast<int32_t>(tiles_.size());
    if constexpr (kRecord) pieces_.resize(num_tiles + gpu_columns_);  // a border cuts one tile
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
      const int64_t min_piece = cost.min_piece(kind);
      int64_t begin = tile.kv_begin, left = config_->kv_tiles(tile.kv_end - begin);
      while (cost.of(kind, left) > room) {
        const int64_t take = std::min(cost.kv_tiles_for(kind, room), left - min_piece);
        if (take >= min_piece) {
          const int64_t end = begin + (take << config_->tile_kv_log2);
          record(i, begin, end, cost.of(kind, take));
          begin = end;
          left -= take;
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

  // With less than this an empty column could not take a legal piece of every tile.
  int64_t least_share() const {
    const TileCost cost(*config_);
    return std::max(cost.of(0, 2 * cost.min_piece(0) - 1), cost.of(1, 2 * cost.min_piece(1) - 1));
  }

  // Few tiles of one cost are cut into as many parts each where that leaves hardly a column empty:
  // 16 tiles take 32 of 33 columns, two each, instead of two or three each (1 % faster on an H200).
  // Long ones take the fewest columns that keep the memory busy: there is less to merge (1 %).
  int64_t columns_of_shares() const {
    const int64_t num_tiles = static_cast<int64_t>(tiles_.size());
    if (min_cost_ != max_cost_ || num_tiles > gpu_columns_) return gpu_columns_;
    const bool is_long = total_cost_ >= gpu_columns_ * TileCost(*config_).of(0, 24);
    const int64_t most = is_long ? gpu_columns_ / config_->lone_speed : gpu_columns_;
    const int64_t columns = most / num_tiles * num_tiles;
    return 32 * columns >= 31 * most && columns > 0 ? columns : gpu_columns_;
  }

  // What each column gets if every border between columns cuts a tile.
  int64_t expected_share() const {
    const int64_t cuts = (share_columns_ - 1) * TileCost(*config_).per_piece(0);
    return std::max(least_share(), ceil_div(total_cost_ + cuts, share_columns_));
  }

  // The smallest share, to about 1/256, with which the columns of the GPU suffice. All costs are
  // multiples of one unit, and so are the shares that can make a difference.
  int64_t smallest_share() {
    const TileCost cost(*config_);
    const int64_t unit = config_->tile_q_second > 0 ? std::min(cost.per_piece(0), cost.per_piece(1))
                                                    : cost.per_piece(0);
    const int64_t lowest = std::max(least_share(), ceil_div(total_cost_, share_columns_));
    int64_t low = ceil_div(lowest, unit) - 1;  // too small; in units, as what follows
    int64_t high = std::max(low + 1, ceil_div(expected_share(), unit));
    int64_t step = std::max<int64_t>(1, high / 64);
    while (!is_enough(high * unit)) {
      low = high;
      high += step;
      step *= 2;
    }
    // What cutting costs hardly depends on the share: what the columns held now tells where the
    // search is likely to end, and two tries spare most of the bisection.
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

  // Parts of a cut tile get consecutive slots, in order of KV.
  void number_slots() {
    for (Piece& piece : pieces_) {
      const Tile& tile = tiles_[piece.tile];
      if (!is_cut(tile, piece)) continue;
      piece.slot = static_cast<int32_t>(num_slots_++);
      if (piece.kv_begin == tile.kv_begin) {
        ++num_merges_;
        max_cut_rows_ = std::max(max_cut_rows_, tile_rows(tile));
      }
    }
  }

  // ---- Whole tiles, longest first ----

  // Whether the longest column of whole tiles is within 1/32 of an equal share, or within what a
  // merge costs.
  bool whole_tiles_are_balanced() {
    const int64_t num_tiles = static_cast<int64_t>(tiles_.size());
    if (num_tiles == 0) return true;
    const int64_t share = expected_share();
    const int64_t allowed = share + share / 32 + TileCost(*config_).of_merging();
    const int64_t even = ceil_div(total_cost_, gpu_columns_);
    if (max_cost_ > allowed * config_->lone_speed) return false;
    if (min_cost_ == max_cost_) {
      const int64_t rounds = num_tiles / gpu_columns_, rest = num_tiles % gpu_columns_;
      return rounds * max_cost_ + time_of(max_cost_, rest) <= allowed;
    }
    if (num_tiles <= gpu_columns_ && max_cost_ <= allowed) return true;
    if (even + max_cost_ <= allowed) return true;
    // So many that the short ones at the end fill every gap; dealing them out would take long.
    if (num_tiles >= 32 * gpu_columns_ && max_cost_ <= even) return true;
    take_whole_tiles();
    sort_longest_first();
    if (deal_to_least_loaded() <= allowed || end_of_columns() <= allowed) return true;
    pieces_.clear();
    order_.clear();
    return false;
  }

  // How long `columns` columns take for `cost` each while no other runs.
  int64_t time_of(int64_t cost, int64_t columns) const {
    if (columns == 0) return 0;
    const int64_t speed = config_->lone_speed;
    return ceil_div(cost * std::max(gpu_columns_, speed * columns), speed * gpu_columns_);
  }

  // When the last of the columns that were dealt ends.
  int64_t end_of_columns() {
    std::sort(loads_.begin(), loads_.end());
    int64_t end = 0, done = 0;  // done: cost of the columns that have ended by then
    for (size_t i = 0; i < loads_.size(); ++i) {
      end += time_of(cost_of(loads_[i]) - done, loads_.size() - i);
      done = cost_of(loads_[i]);
    }
    return end;
  }

  // Sorts by cost, to 1/1024 of the range of costs; ties stay in order of the tiles.
  void sort_longest_first() {
    int64_t low = INT64_MAX, high = 0;
    for (const Piece& piece : pieces_) {
      low = std::min(low, piece.cost);
      high = std::max(high, piece.cost);
    }
    int shift = 0;
    while ((high - low) >> shift >= kSortBuckets) ++shift;
    order_.resize(pieces_.size());
    std::vector<int32_t>& starts = sort_starts_;
    const int64_t buckets = ((high - low) >> shift) + 1;
    starts.assign(buckets + 1, 0);
    for (const Piece& piece : pieces_) ++starts[((high - piece.cost) >> shift) + 1];
    for (int64_t i = 0; i < buckets; ++i) starts[i + 1] += starts[i];
    for (size_t i = 0; i < pieces_.size(); ++i) {
      order_[starts[(high - pieces_[i].cost) >> shift]++] = static_cast<int32_t>(i);
    }
  }

  // Each piece in turn goes to the column with the least cost so far. Returns the largest cost.
  int64_t deal_to_least_loaded() {
    loads_.clear();
    int64_t longest = 0;
    for (const int32_t index : order_) {
      Piece& piece = pieces_[index];
      int64_t cost = piece.cost;
      if (static_cast<int64_t>(loads_.size()) < gpu_columns_) {
        piece.column = static_cast<int32_t>(loads_.size());
        loads_.push_back(load_of(cost, piece.column));
        if (static_cast<int64_t>(loads_.size()) == gpu_columns_) {
          std::make_heap(loads_.begin(), loads_.end(), std::greater<uint64_t>());
        }
      } else {
        piece.column = column_of(loads_.front());
        cost += cost_of(loads_.front());
        replace_least(load_of(cost, piece.column));
      }
      longest = std::max(longest, cost);
    }
    return longest;
  }

  // Which child is less is a sum and not a branch, as nobody can predict it.
  void replace_least(uint64_t load) {
    const size_t size = loads_.size();
    size_t hole = 0;
    for (size_t child = 1; child < size; child = 2 * hole + 1) {
      if (child + 1 < size) child += loads_[child + 1] < loads_[child];
      if (load < loads_[child]) break;
      loads_[hole] = loads_[child];
      hole = child;
    }
    loads_[hole] = load;
  }

  void deal_longest_first() {
    if (pieces_.empty()) return;
    if (order_.empty()) sort_longest_first();
    if (config_->is_graph()) {
      deal_to_least_loaded();
      return;
    }
    num_columns_ = std::min<int64_t>(pieces_.size(), kMaxColumns);
    int64_t column = 0;
    for (const int32_t index : order_) {
      pieces_[index].column = static_cast<int32_t>(column);
      if (++column == num_columns_) column = 0;
    }
  }

  // ---- Layout and writing ----

  void decide_layout(int64_t float_bytes) {
    PlanLayout& layout = layout_;
    const int64_t num_pieces = static_cast<int64_t>(pieces_.size());
    layout.is_too_long = num_pieces > kMaxPieces;
    layout.num_ctas = num_columns_;
    layout.num_merges = num_merges_;
    layout.rows_per_slot = max_cut_rows_;
    layout.num_slots = num_slots_;
    int64_t used_items = num_pieces, max_items = num_pieces;
    if (config_->is_graph()) {
      used_items += gpu_columns_;  // an empty column keeps its first item
      max_items = std::max(used_items, reserve_for_graph(float_bytes));
    }
    layout.merged_rows = merged_rows();
    layout.merges_offset = 0;
    layout.items_offset = ceil_div(layout.num_merges * sizeof(MergeItem), 128) * 128;
    layout.int_bytes = layout.items_offset + max_items * sizeof(WorkItem);
    layout.used_bytes = layout.items_offset + used_items * sizeof(WorkItem);
    layout.sums_offset = sums_offset(layout.num_slots);
    layout.float_bytes = layout.sums_offset + layout.num_slots * slot_rows() * kSumsBytes;
  }

  // One row per CTA while these run at a time, since its parts are then spread over eight warps;
  // else four, since each CTA costs more than its few parts. How many warps a row has decides in
  // which order its parts are added: with fixed splits nothing of the batch may.
  int64_t merged_rows() const {
    const int64_t rows = layout_.rows_per_slot;
    const bool at_a_time = layout_.num_merges * config_->num_kv_heads * rows <= 64;
    return config_->fixed_split_size > 0 || at_a_time ? 1 : std::min<int64_t>(rows, 4);
  }

  // What a captured launch and its kernels' arguments are made from must be the same for every
  // batch within the capacity. Returns the most items that there can be; with fixed split size
  // there is no bound but the workspaces: merges come first, so that items may take what is left,
  // and slots are as many as fit.
  int64_t reserve_for_graph(int64_t float_bytes) {
    PlanLayout& layout = layout_;
    const int64_t tiles = max_tiles(*config_, config_->graph_batch_size, config_->graph_qo_tokens);
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

  // The first item of column c is items[c]; those that follow in a column come behind all first
  // ones, in the order in which they are dealt.
  void write_items(WorkItem* items) {
    const int32_t num_ctas = static_cast<int32_t>(layout_.num_ctas);
    last_of_column_.assign(num_ctas, -1);
    int32_t unused = num_ctas;
    const size_t num_pieces = pieces_.size();
    for (size_t i = 0; i < num_pieces; ++i) {
      const Piece& piece = pieces_[order_.empty() ? i : order_[i]];
      int32_t& last = last_of_column_[piece.column];
      const int32_t index = last < 0 ? piece.column : unused++;
      if (last >= 0) items[last].next = index;
      last = index;
      const Tile& tile = tiles_[piece.tile];
      const PlanRequest& request = groups_[group_of(tile)]->requests[tile.request];
      WorkItem item;
      item.request = tile.request;
      item.kind = tile.kind;
      item.qo_begin = request.qo_begin;
      item.qo_len = request.qo_len;
      item.kv_len = request.kv_len;
      item.kv_base = request.kv_base;
      item.row_begin = tile.row_begin;
      item.kv_begin = piece.kv_begin;
      item.kv_end = piece.kv_end;
      item.partial_slot = piece.slot;
      item.next = -1;
      item.lists_taken = 0;
      items[index] = item;
    }
    for (int32_t column = 0; column < num_ctas; ++column) {
      if (last_of_column_[column] < 0) {
        items[column] = WorkItem{};
        items[column].request = items[column].partial_slot = items[column].next = -1;
      }
    }
  }

  // In order of the tiles. A graph's merges that this plan does not need have no rows.
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
      }
      if (piece.kv_end == tile.kv_end) (merge++)->slot_end = piece.slot + 1;
    }
    std::fill(merge, merges + layout_.num_merges, MergeItem{});
  }

  static constexpr int64_t kSortBuckets = 1024;

  const PlanConfig* config_ = nullptr;
  const RequestGroup* groups_[2] = {};
  int64_t gpu_columns_ = 0;
  int64_t share_columns_ = 0;  // of these, that equal shares take
  int64_t total_cost_ = 0, max_cost_ = 0, min_cost_ = 0;
  int64_t walked_cost_ = 0;  // of the latest walk, with what closed columns left empty
  int64_t num_columns_ = 0, num_slots_ = 0, num_merges_ = 0, max_cut_rows_ = 0;
  PlanLayout layout_ = {};

  std::vector<Tile> tiles_;
  std::vector<Piece> pieces_;   // by tile, then by KV
  std::vector<int32_t> order_;  // in which pieces are written; empty: as they are
  std::vector<int32_t> sort_starts_, last_of_column_;
  std::vector<uint64_t> loads_;
};

}  // namespace flashinfer
