// Estimates which attention kernel takes less time for a batch, and chooses the portable kernel's
// tile. Plain C++.
//
// The planner's own arithmetic (attention_shares.h) tells when the last CTA has finished its share
// of KV tiles and pieces, here from the lengths alone, without a list of tiles. A launch takes
//
//   start + (compute^p + loads^p)^(1/p) + merging
//   compute = per_kv_tile * that end, loads = first_keys + bytes of Q, K, V and O / DRAM
//
// as what overlaps delays each other where both take as long. CTAs are faster while others are
// idle: those of SMs that have no second one, and all of them where the last one ends late.
// Merging, if tiles are split, is a launch, the bytes of partial results, and the parts of a row in
// sequence. flashinfer/_attention/plan/speeds.py holds the measured constants. Only the order of
// two times matters: masks cost both kernels the same and are left out.
//
// Measurements, also of what lost: docs/tuning/kernel_choice.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <flashinfer/scheduler/attention_shares.h>
#include <flashinfer/scheduler/attention_tiles.h>

namespace flashinfer {

struct KernelSpeed {
  int64_t ctas;        // CTAs per SM
  double start;        // [us]; infinite: the kernel does not support the batch
  double per_kv_tile;  // [us] per CTA, with as many CTAs as fit
  double alone;        // factor for a CTA that has its SM to itself
  double idle;         // how much faster, in logarithms, one CTA would be than all
  double merge;        // [us], the merge launch
  // KV tiles that each tile of a CTA costs beyond the planner's count. Further tiles of fewer rows
  // cost as much less of it as their KV tiles do.
  double piece;
  double dram;  // share of the memory's speed that it reads at
};

// A tile of the portable kernel and the batches it is used for.
struct PortableTile {
  int64_t tile_q;    // packed rows
  double most_rows;  // rows of the longest request up to which the tile is used ...
  double mean_rows;  // ... or the mean number of rows
  KernelSpeed speed;
  KernelSpeed both;  // of a launch that has the second tile as well
};

// Heads, memory and kernels of one kind of launch. Python passes its bytes: each field has 8 bytes,
// and flashinfer/_attention/plan/speeds.py declares the same fields.
struct KernelModel {
  int64_t num_kv_heads, group_size, head_dim_vo;
  int64_t num_sms;
  int64_t key_bytes;     // K and V of one token and head
  int64_t qo_bytes;      // Q and O of one token, of all heads
  double first_keys;     // [us] until the first keys arrive from DRAM
  double dram, partial;  // [bytes per us], for K and V, and for partial results
  double per_part;       // [us] per part of a row
  double overlap;        // p
  // Second tile, for requests that fit it if others do not; 0: one tile for all.
  int64_t tile_q_second;
  int64_t portable_tile_kv, portable_piece_tiles;  // as in PlanConfig
  int64_t hopper_tile_q, hopper_tile_kv, hopper_piece_tiles;
  KernelSpeed hopper_speed;
  int64_t num_tiles;
  PortableTile tiles[4];  // the first one that suits the batch is taken; the last suits any
};

struct KernelEstimate {
  int64_t tile_q;  // of the portable kernel
  double portable_us, hopper_us;
  // Portable kernel for requests that fit the second tile, Hopper kernel for the others.
  double apart_us;
  int64_t few_rows;  // most rows of a request that fits the second tile; 0: one tile for all
};

// Counts the tiles of a launch without a list of them.
class LaunchEstimate {
 public:
  LaunchEstimate(const KernelModel& model, const KernelSpeed& speed, int64_t tile_q,
                 int64_t tile_kv, int64_t tile_q_second, int64_t piece_tiles)
      : model_(model), speed_(speed) {
    config_ = {};
    config_.num_kv_heads = model.num_kv_heads;
    config_.group_size = model.group_size;
    config_.head_dim_vo = model.head_dim_vo;
    config_.tile_q = tile_q;
    config_.tile_q_second = tile_q_second;
    config_.cta_slots = speed.ctas * model.num_sms;
    config_.tile_kv = tile_kv;
    config_.piece_tiles = piece_tiles;
    config_.graph_batch_size = -1;
    for (int kind = 0; kind < 2; ++kind) {
      Kind& of = kinds_[kind];
      of.tile_q = std::max<int64_t>(1, kind ? tile_q_second : tile_q);
      of.cost = TileCost(config_).per_kv_tile(kind);
      of.tokens = static_cast<double>(of.tile_q) / model.group_size;
      of.per_token = 1 / of.tokens;
      of.kv_tiles = of.tokens / tile_kv;
      of.partly = 0.5 * (1 - std::min(of.kv_tiles, 1.0));
    }
    per_key_ = 1.0 / tile_kv;
  }

  void add(const RequestGroup& group, const PlanRequest& request, int64_t rows) {
    if (rows == 0) return;
    const int kind_index = rows <= config_.tile_q_second;
    const Kind& kind = kinds_[kind_index];
    const uint32_t tiles =
        static_cast<uint32_t>(rows + kind.tile_q - 1) / static_cast<uint32_t>(kind.tile_q);
    const int64_t kv_len = request.kv_len, before = kv_len - request.qo_len;
    const int64_t all = config_.kv_tiles(kv_len);
    int64_t most = all, least = all;
    double seen = static_cast<double>(kv_len), sum = static_cast<double>(all * tiles);
    bool is_bounded = false;
    if (group.window_left >= 0 && group.window_left + kind.tokens < seen) {
      is_bounded = true;
      seen = group.window_left + kind.tokens;  // plus a part of a KV tile at either end
      const double kv_tiles = (seen - 1) * per_key_;
      most = least = std::min(all, static_cast<int64_t>(kv_tiles) + 2);
      sum = std::min(sum, tiles * (kv_tiles + 1));
    }
    if (group.causal && tiles > 1) {
      // The last tile of a request sees these keys. Each tile before it sees `tokens` fewer once
      // the window is not full. A partly filled KV tile counts as a whole one.
      const double hidden = std::max(seen - before, 0.0);
      const double fewer = std::min<double>(tiles, hidden * kind.per_token);
      const double others = seen * per_key_ + kind.partly + (is_bounded ? 0.5 : 0.0);
      sum = most + (tiles - 1.0) * std::min<double>(most, others);
      if (fewer > 1) {
        sum -= 0.5 * kind.kv_tiles * fewer * (fewer - 1);
        const int64_t first = before + static_cast<int64_t>(kind.tokens);
        least = std::min(most, std::max<int64_t>(1, config_.kv_tiles(first)));
      }
      sum = std::max<double>(sum, tiles);
    }
    const int64_t cost = static_cast<int64_t>((sum + tiles * config_.piece_tiles) * kind.cost);
    const int64_t most_cost = (most + config_.piece_tiles) * kind.cost;
    num_tiles_ += tiles;
    tile_costs_ += tiles * kind.cost;
    totals_.cost += cost;
    totals_.rows += static_cast<double>(std::min(rows, kind.tile_q) * cost);
    totals_.most = std::max(totals_.most, most_cost);
    totals_.least = std::min(totals_.least, (least + config_.piece_tiles) * kind.cost);
    totals_.most_of[kind_index] = std::max(totals_.most_of[kind_index], most_cost);
    const bool has_window = group.window_left >= 0;
    queries_ += request.qo_len;
    keys_ += has_window ? std::min<int64_t>(kv_len, request.qo_len + group.window_left) : kv_len;
  }

  double us() const {
    if (num_tiles_ == 0) return speed_.start;
    const double heads = static_cast<double>(config_.num_kv_heads);
    const double slots = static_cast<double>(config_.cta_slots);
    const double unit = static_cast<double>(TileCost(config_).per_kv_tile(0));
    const EqualShares shares(config_, totals_, num_tiles_);
    double lists = num_tiles_ * heads, end = static_cast<double>(totals_.most), merging = 0;
    if (lists > slots && totals_.least == totals_.most) {
      end *= std::ceil(lists / slots);
    } else if (lists > slots) {
      end = std::max(end, totals_.cost * heads / slots + 0.5 * totals_.least);
    }
    if (end > shares.end() + shares.end() / 32) {
      const double columns = static_cast<double>(shares.columns());
      const double parts = num_tiles_ < columns ? columns : 1.5 * columns;
      const double rows = parts * heads * totals_.rows / totals_.cost;
      lists = columns * heads;
      end = static_cast<double>(shares.waves() * shares.share());
      merging = speed_.merge + 4 * rows * config_.head_dim_vo / model_.partial +
                model_.per_part * std::max(1.0, columns / num_tiles_);
    }
    const double busy = std::min(1.0, totals_.cost * heads / (slots * end));
    const double further = std::max(lists / slots - 1, 0.0);
    const double pieces = 1 + further * tile_costs_ / (num_tiles_ * unit);
    const double kv_tiles = std::max(end / unit + speed_.piece * pieces, 0.1);
    const double alone = lists <= model_.num_sms ? speed_.alone : 1;
    const double compute =
        kv_tiles * speed_.per_kv_tile * alone * std::exp(speed_.idle * (busy - 1));
    const double bytes = keys_ * heads * model_.key_bytes + queries_ * model_.qo_bytes;
    const double loads = model_.first_keys + bytes / (model_.dram * speed_.dram);
    const double longer = std::max(compute, loads), ratio = std::min(compute, loads) / longer;
    const double both = longer * std::pow(1 + std::pow(ratio, model_.overlap), 1 / model_.overlap);
    return speed_.start + both + merging;
  }

 private:
  struct Kind {
    int64_t tile_q, cost;      // cost of a KV tile
    double tokens, per_token;  // tokens of a tile, and its reciprocal
    double kv_tiles;           // KV tiles that hold as many keys as a tile has tokens
    double partly;             // mean unseen part of a tile's last KV tile
  };

  const KernelModel& model_;
  const KernelSpeed& speed_;
  PlanConfig config_;
  Kind kinds_[2];
  double per_key_;
  TileTotals totals_;
  int64_t num_tiles_ = 0;
  int64_t tile_costs_ = 0;  // of a KV tile, summed over the tiles
  double keys_ = 0;         // keys that any row sees
  double queries_ = 0;      // tokens
};

class KernelEstimator {
 public:
  KernelEstimator(const KernelModel& model, const RequestGroup& group)
      : model_(model), group_(group) {
    for (const PlanRequest& request : group.requests) {
      const int64_t rows = rows_of(request);
      longest_ = std::max(longest_, rows);
      all_rows_ += rows;
      if (rows <= model.tile_q_second) few_rows_ = std::max(few_rows_, rows);
    }
    if (longest_ <= model.tile_q_second) few_rows_ = 0;
    second_ = few_rows_ > 0 ? model.tile_q_second : 0;
  }

  KernelEstimate estimate() const {
    const PortableTile& tile = portable_tile();
    KernelEstimate found = {tile.tile_q, 0, model_.hopper_speed.start, INFINITY, few_rows_};
    if (std::isinf(model_.hopper_speed.start)) return found;
    const KernelSpeed& speed = second_ > 0 ? tile.both : tile.speed;
    found.portable_us = portable_us(speed, tile.tile_q, second_, 0, INT64_MAX);
    found.hopper_us = hopper_us(0);
    if (second_ > 0) {
      found.apart_us = portable_us(speed_of_few(), second_, 0, 0, second_) + hopper_us(second_ + 1);
    }
    return found;
  }

 private:
  // Time of the requests whose number of rows lies in this range.
  double portable_us(const KernelSpeed& speed, int64_t tile_q, int64_t second, int64_t least,
                     int64_t most) const {
    LaunchEstimate launch(model_, speed, tile_q, model_.portable_tile_kv, second,
                          model_.portable_piece_tiles);
    add(launch, least, most);
    return launch.us();
  }
  double hopper_us(int64_t least) const {
    LaunchEstimate launch(model_, model_.hopper_speed, model_.hopper_tile_q, model_.hopper_tile_kv,
                          0, model_.hopper_piece_tiles);
    add(launch, least, INT64_MAX);
    return launch.us();
  }
  void add(LaunchEstimate& launch, int64_t least, int64_t most) const {
    for (const PlanRequest& request : group_.requests) {
      const int64_t rows = rows_of(request);
      if (least <= rows && rows <= most) launch.add(group_, request, rows);
    }
  }

  int64_t rows_of(const PlanRequest& request) const {
    return int64_t{request.qo_len} * model_.group_size;
  }

  // Tile for the requests that have more rows than the second tile.
  const PortableTile& portable_tile() const {
    int64_t rows = all_rows_, count = group_.requests.size();
    if (second_ > 0) {
      for (const PlanRequest& request : group_.requests) {
        const int64_t its = rows_of(request);
        if (its > second_) continue;
        rows -= its;
        --count;
      }
    }
    const double mean = count > 0 ? static_cast<double>(rows) / count : 0;
    for (int64_t i = 0; i + 1 < model_.num_tiles; ++i) {
      const PortableTile& tile = model_.tiles[i];
      if (longest_ <= tile.most_rows || mean <= tile.mean_rows) return tile;
    }
    return model_.tiles[model_.num_tiles - 1];
  }

  // Speed of a launch for the requests that fit the second tile, with a tile of that size.
  const KernelSpeed& speed_of_few() const {
    for (int64_t i = 0; i + 1 < model_.num_tiles; ++i) {
      const PortableTile& tile = model_.tiles[i];
      if (few_rows_ <= tile.most_rows) return tile.speed;
    }
    return model_.tiles[model_.num_tiles - 1].speed;
  }

  const KernelModel& model_;
  const RequestGroup& group_;
  int64_t longest_ = 0, all_rows_ = 0, few_rows_ = 0;
  int64_t second_;  // the second tile, if only some requests fit it
};

}  // namespace flashinfer
