// Equal shares of a batch: how many columns of CTAs take one share each, and when the last column
// ends. Plain C++. Times are costs as in attention_tiles.h.
//
// Measurements, also of what lost: docs/tuning/kernel_choice.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <flashinfer/scheduler/attention_tiles.h>

namespace flashinfer {

class EqualShares {
 public:
  EqualShares() = default;

  // Takes the option that ends first: as many columns as the GPU has CTA slots for all heads; a few
  // times as many, which leaves fewer slots empty but starts more pieces; or so few columns that a
  // further one would cost more in merging than it saves.
  EqualShares(const PlanConfig& config, const TileTotals& totals, int64_t num_tiles)
      : config_(&config), totals_(&totals), num_tiles_(num_tiles) {
    const int64_t slots = config.cta_slots, heads = config.num_kv_heads;
    const int64_t most = gpu_columns(config);
    EqualShares best;
    const auto consider = [&](int64_t columns, int64_t waves) {
      set_columns(columns, waves);
      if (end() < best.end_) best = *this, best.end_ = end();
    };
    for (int64_t waves = 1; waves <= 4; ++waves) {
      const int64_t columns = waves * slots / heads;
      if (0 < columns && columns <= most) consider(columns, waves);
    }
    if (best.columns_ == 0) consider(most, ceil_div(most * heads, slots));
    const double few = std::sqrt(kv_tiles(totals.cost) / (parts_per_column() + chain()));
    if (num_tiles < few && few < best.columns_) {
      consider(static_cast<int64_t>(few / num_tiles) * num_tiles, 1);
    }
    *this = best;
  }

  int64_t columns() const { return columns_; }
  int64_t waves() const { return waves_; }  // times that the columns fill the CTA slots
  int64_t min_piece() const { return min_piece_; }

  // When the last column ends, merge included.
  int64_t end() const {
    // Launching the merge takes 3 us; the Hopper kernel hides half of it. Tiles of two shapes side
    // by side take less time than their costs say, so splitting saves less.
    const double hidden = config_->tile_q > 16 && config_->piece_tiles == 1 ? 2 : 1;
    const double launch = config_->tile_q_second > 0 ? 4 : hidden;
    const double parts = num_tiles_ < columns_ ? 1 : 1.5;  // 1.5: a border splits one of many tiles
    const double merging = launch + columns_ * (parts * parts_per_column() + chain());
    return waves_ * share() + static_cast<int64_t>(merging * TileCost(*config_).per_kv_tile(0));
  }

  // Share of a column if every border between columns splits a tile.
  int64_t share() const {
    const int64_t cuts = (columns_ - 1) * TileCost(*config_).per_piece(0);
    return std::max(least_share(), ceil_div(totals_->cost + cuts, columns_));
  }

  // With a smaller share an empty column could hold neither every tile nor a legal piece of one.
  int64_t least_share() const {
    const TileCost cost(*config_);
    int64_t least = 0;
    for (int kind = 0; kind < 2; ++kind) {
      least = std::max(least, std::min(cost.of(kind, min_piece_), totals_->most_of[kind]));
    }
    return least;
  }

  // Number of columns that the GPU holds at a time, or a small multiple of it if the CTA slots are
  // not a multiple of the heads: of the first four multiples, the first one that leaves less than 3
  // % of the slots empty, else the best one. A graph has this many columns.
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
  static constexpr int64_t kMaxColumns = 32767;  // times 65535 heads, a grid is below 2^31

 private:
  // A part has at least 128 keys, and more if a column that stays empty for that long costs less
  // than another part.
  void set_columns(int64_t columns, int64_t waves) {
    columns_ = columns;
    waves_ = waves;
    min_piece_ = std::max<int64_t>(config_->kv_tiles(128), columns * parts_per_column());
  }

  double kv_tiles(int64_t cost) const {
    return static_cast<double>(cost) / TileCost(*config_).per_kv_tile(0);
  }
  // Cost in KV tiles of one part in each column. Rows are written in fp32 and read again, about 2.8
  // MB in the time of a KV tile (1.3 to 2.9 us on an H200 for any kernel).
  double parts_per_column() const {
    const double rows = totals_->cost > 0 ? totals_->rows / totals_->cost : 0;
    return 4.0 * rows * config_->head_dim_vo * config_->num_kv_heads / 2.8e6;
  }
  // The parts of a row are added in sequence, about 32 in the time of a KV tile.
  double chain() const { return 1 / (32.0 * std::max<int64_t>(num_tiles_, 1)); }

  const PlanConfig* config_ = nullptr;
  const TileTotals* totals_ = nullptr;
  int64_t num_tiles_ = 0, columns_ = 0, waves_ = 1, min_piece_ = 1;
  int64_t end_ = INT64_MAX;
};

}  // namespace flashinfer
