// Plans an MLA launch: gives every CTA an equal share of KV steps and writes the list of
// mla_work.h. Plain C++; keeps its scratch memory, so that planning again allocates nothing.
//
// The tiles of one request read the same KV rows. Up to kMlaMaxLanes of them run side by side on
// neighbouring CTAs, so that a row comes from DRAM once: such a group of tiles is a unit, and the
// CTAs form columns of `lanes` CTAs. All units stand in a row, each as long as its KV steps and a
// fixed overhead, and the row is cut into one share per column.
#pragma once

#include <algorithm>
#include <cstdint>
#include <flashinfer/scheduler/mla_work.h>
#include <utility>
#include <vector>

namespace flashinfer {

struct MlaRequest {
  int32_t qo_begin, qo_len, kv_base, kv_len;
};

struct MlaPlanConfig {
  int64_t num_heads;
  int64_t num_ctas;
  bool causal;
  bool splits;  // false: no tile is cut, so that a result does not depend on the batch
};

class MlaPlanner {
 public:
  static constexpr int64_t kRows = kMlaTileRows;
  static constexpr int64_t kStepTokens = 128;  // that a kernel takes at once
  // Cost of an item besides its steps, in half steps: its queries, the last product, its output.
  static constexpr int64_t kItemCost = 5, kStepCost = 2;

  // Decides; fills in the sizes of `plan`. The list has room for an item of each CTA (share.cuh).
  void plan(const MlaPlanConfig& config, const std::vector<MlaRequest>& requests, MlaPlan& plan) {
    config_ = config;
    requests_ = &requests;
    choose_lanes();
    list_units();
    if (config.splits) {
      cut(smallest_share());
    } else {
      deal_whole_units();
    }
    plan.num_ctas = config.num_ctas;
    plan.num_items = num_items_;
    plan.num_merges = static_cast<int64_t>(merges_.size());
    plan.num_slots = num_slots_;
    plan.few_parts = true;
    for (const MlaMerge& merge : merges_) plan.few_parts &= merge.num_parts <= kMlaFewParts;
    plan.in_pairs = is_in_pairs();
    plan.int_bytes =
        MlaPlanLayout(config.num_ctas).items_offset +
        std::max(num_items_, config.num_ctas) * static_cast<int64_t>(sizeof(MlaWorkItem));
  }

  // Writes the plan to `workspace`, which has the plan's int_bytes.
  void write(char* workspace) const {
    const MlaPlanLayout layout(config_.num_ctas);
    auto* header = reinterpret_cast<MlaPlanHeader*>(workspace);
    *header = {static_cast<int32_t>(merges_.size()), static_cast<int32_t>(num_items_), {}};
    auto* cta_begin = reinterpret_cast<int32_t*>(workspace + layout.cta_begin_offset);
    auto* merges = reinterpret_cast<MlaMerge*>(workspace + layout.merges_offset);
    std::copy(merges_.begin(), merges_.end(), merges);
    std::fill(workspace + layout.counters_offset, workspace + layout.items_offset, '\0');
    auto* items = reinterpret_cast<MlaWorkItem*>(workspace + layout.items_offset);
    int32_t count = 0;
    for (int64_t cta = 0; cta < config_.num_ctas; ++cta) {
      cta_begin[cta] = count;
      const size_t column = cta / lanes_, lane = cta % lanes_;
      if (column >= columns_.size()) continue;
      for (const Piece& piece : columns_[column]) {
        if (has_lane(piece, lane)) items[count++] = item_of(piece, lane);
      }
    }
    cta_begin[config_.num_ctas] = count;
  }

 private:
  struct Unit {
    int32_t request, first_tile, num_tiles, steps;
  };
  struct Piece {
    int32_t unit, first_step, num_steps;
    int32_t slot, merge;  // of lane 0; a negative slot: the unit is whole
  };

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  int64_t num_tiles(const MlaRequest& request) const {
    return ceil_div(request.qo_len * config_.num_heads, kRows);
  }

  // As many lanes as the requests have tiles, unless these are many: then as many as a token has.
  void choose_lanes() {
    int64_t most = 1;
    for (const MlaRequest& request : *requests_) most = std::max(most, num_tiles(request));
    if (most > kMlaMaxLanes) most = ceil_div(config_.num_heads, kRows);
    lanes_ = std::min({most, kMlaMaxLanes, config_.num_ctas});
  }

  // Tokens that the last row before `row_end` sees.
  int64_t visible(const MlaRequest& request, int64_t row_end) const {
    if (!config_.causal) return request.kv_len;
    const int64_t token = ceil_div(row_end, config_.num_heads) - 1;
    return std::max<int64_t>(0, request.kv_len - request.qo_len + token + 1);
  }

  void list_units() {
    units_.clear();
    for (size_t i = 0; i < requests_->size(); ++i) {
      const MlaRequest& request = (*requests_)[i];
      const int64_t tiles = num_tiles(request), rows = request.qo_len * config_.num_heads;
      for (int64_t first = 0; first < tiles; first += lanes_) {
        const int64_t count = std::min(lanes_, tiles - first);
        const int64_t seen = visible(request, std::min(rows, (first + count) * kRows));
        units_.push_back({static_cast<int32_t>(i), static_cast<int32_t>(first),
                          static_cast<int32_t>(count),
                          static_cast<int32_t>(ceil_div(seen, kStepTokens))});
      }
    }
  }

  int64_t num_columns() const { return config_.num_ctas / lanes_; }

  // The least share with which the units fit the columns.
  int64_t smallest_share() const {
    int64_t total = 0;
    for (const Unit& unit : units_) total += kItemCost + kStepCost * unit.steps;
    int64_t low = std::max<int64_t>(ceil_div(total, num_columns()), kItemCost + kStepCost);
    int64_t high = low;
    while (!fits(high)) high += std::max<int64_t>(high / 4, 1);
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (fits(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return high;
  }

  // Walks the units with columns of `share`; `emit(column, unit, first_step, num_steps)`.
  template <typename Emit>
  void walk(int64_t share, const Emit& emit) const {
    int64_t column = 0, left = share;
    for (size_t u = 0; u < units_.size(); ++u) {
      int64_t step = 0, steps = units_[u].steps;
      do {
        // A piece has at least one step; a first piece that would be only that waits for the next
        // column.
        if (left < kItemCost + std::min<int64_t>(steps - step, 1) * kStepCost) {
          ++column;
          left = share;
        }
        const int64_t room = std::max<int64_t>((left - kItemCost) / kStepCost, 0);
        const int64_t taken = std::min(steps - step, room);
        if (!emit(column, static_cast<int32_t>(u), step, taken)) return;
        left -= kItemCost + taken * kStepCost;
        step += taken;
      } while (step < steps);
    }
  }

  bool fits(int64_t share) const {
    int64_t last = 0;
    walk(share, [&](int64_t column, int32_t, int64_t, int64_t) {
      last = column;
      return column < num_columns();
    });
    return last < num_columns();
  }

  void clear_columns() {
    columns_.resize(num_columns());
    for (auto& column : columns_) column.clear();
    merges_.clear();
    num_slots_ = num_items_ = 0;
  }

  void cut(int64_t share) {
    clear_columns();
    walk(share, [&](int64_t column, int32_t u, int64_t step, int64_t steps) {
      columns_[column].push_back(
          {u, static_cast<int32_t>(step), static_cast<int32_t>(steps), -1, -1});
      num_items_ += units_[u].num_tiles;
      return true;
    });
    assign_slots();
  }

  // Pieces of a unit lie in neighbouring columns, the last of one and the first of the next.
  void assign_slots() {
    int32_t current = -1, parts = 0;
    const auto finish = [&] {
      if (parts < 2) return;
      const Unit& unit = units_[current];
      const MlaRequest& request = (*requests_)[unit.request];
      for (int32_t lane = 0; lane < unit.num_tiles; ++lane) {
        merges_.push_back({request.qo_begin,
                           request.qo_len,
                           static_cast<int32_t>((unit.first_tile + lane) * kRows),
                           static_cast<int32_t>(num_slots_ - parts * lanes_ + lane),
                           parts,
                           static_cast<int32_t>(lanes_),
                           {}});
      }
    };
    for (auto& column : columns_) {
      for (Piece& piece : column) {
        if (piece.unit != current) {
          finish();
          current = piece.unit;
          parts = 0;
        }
        if (piece.num_steps == units_[piece.unit].steps) continue;
        piece.slot = static_cast<int32_t>(num_slots_);
        piece.merge = static_cast<int32_t>(merges_.size());
        num_slots_ += lanes_;
        ++parts;
      }
    }
    finish();
  }

  bool is_in_pairs() const {
    if (merges_.empty() || merges_.size() != units_.size()) return false;
    for (const MlaRequest& request : *requests_) {
      if (request.qo_len * config_.num_heads > kMlaFewRows) return false;
    }
    for (size_t column = 0; column < columns_.size(); ++column) {
      const bool is_used = column < 2 * units_.size();
      if (columns_[column].size() != (is_used ? 1 : 0)) return false;
      if (is_used && columns_[column][0].unit != static_cast<int32_t>(column / 2)) return false;
    }
    return true;
  }

  // The longest units first, each to the column with the least to do.
  void deal_whole_units() {
    clear_columns();
    order_.resize(units_.size());
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int32_t>(i);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int32_t a, int32_t b) { return units_[a].steps > units_[b].steps; });
    const auto later = [](const Load& a, const Load& b) { return a > b; };
    loads_.clear();
    for (int64_t column = 0; column < num_columns(); ++column) loads_.push_back({0, column});
    for (const int32_t u : order_) {
      std::pop_heap(loads_.begin(), loads_.end(), later);
      Load& load = loads_.back();
      load.first += kItemCost + kStepCost * units_[u].steps;
      columns_[load.second].push_back({u, 0, units_[u].steps, -1, -1});
      std::push_heap(loads_.begin(), loads_.end(), later);
      num_items_ += units_[u].num_tiles;
    }
  }

  bool has_lane(const Piece& piece, int64_t lane) const {
    return lane < units_[piece.unit].num_tiles;
  }

  MlaWorkItem item_of(const Piece& piece, int64_t lane) const {
    const Unit& unit = units_[piece.unit];
    const MlaRequest& request = (*requests_)[unit.request];
    const int64_t row_begin = (unit.first_tile + lane) * kRows;
    const int64_t row_end = std::min(row_begin + kRows, request.qo_len * config_.num_heads);
    const int64_t end =
        std::min((piece.first_step + piece.num_steps) * kStepTokens, visible(request, row_end));
    const int64_t begin = std::min(piece.first_step * kStepTokens, end);
    return {request.qo_begin,
            request.qo_len,
            request.kv_base,
            request.kv_len,
            static_cast<int32_t>(row_begin),
            static_cast<int32_t>(begin),
            static_cast<int32_t>(end),
            static_cast<int16_t>(piece.slot < 0 ? -1 : piece.slot + lane),
            static_cast<int16_t>(piece.slot < 0 ? -1 : piece.merge + lane)};
  }

  using Load = std::pair<int64_t, int64_t>;  // cost so far, column

  MlaPlanConfig config_ = {};
  const std::vector<MlaRequest>* requests_ = nullptr;
  int64_t lanes_ = 1, num_slots_ = 0, num_items_ = 0;
  std::vector<Unit> units_;
  std::vector<std::vector<Piece>> columns_;
  std::vector<MlaMerge> merges_;
  std::vector<int32_t> order_;
  std::vector<Load> loads_;
};

}  // namespace flashinfer
