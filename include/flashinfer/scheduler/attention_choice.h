// Which attention kernel takes less time for a batch, and the portable one's tile. Plain C++.
//
// A kernel cuts a batch into tiles of query rows; a tile goes over the keys that its rows see, and
// the planner gives every multiprocessor an equal share of all of it, to about the shortest piece
// of a tile that is worth cutting. So a launch takes
//
//   start + per_128_keys * max(sum over the share + one piece * uneven, one piece * alone)
//
// where each tile, and the piece, counts its keys / 128 and `ends`. The numbers are measurements,
// which flashinfer/_attention/speeds.py holds. What counts is which of two times is smaller: both
// kernels have the same masks and options, which are left out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <flashinfer/scheduler/attention_tiles.h>
#include <vector>

namespace flashinfer {

// Of tiles of one number of rows.
struct TileSpeed {
  double per_128_keys;  // [us], with as many CTAs on the multiprocessor as fit
  double ends;          // to begin and to end a tile, in 128 keys
  double alone;         // factor for a CTA whose multiprocessor has no other work
  double uneven;        // of a piece: what the last multiprocessor has more than its share
};

// A tile of the portable kernel, and the batches it is for.
struct PortableTile {
  int64_t tile_q;    // packed rows
  double most_rows;  // of any request: the tile is for batches within this ...
  double mean_rows;  // ... or with a mean within this
  TileSpeed speed;
};

struct KernelModel {
  int64_t num_kv_heads, group_size;
  int64_t num_sms;
  int64_t portable_tile_kv;
  double portable_start;   // [us]
  int64_t tile_q_second;   // of the requests that fit it, if others do not; 0: all have one tile
  TileSpeed second_speed;  // beside the first tile, whose CTAs are larger
  int64_t hopper_tile_q, hopper_tile_kv;
  double hopper_start;  // [us]; infinite: the kernel does not serve the batch
  TileSpeed hopper_speed;
  std::vector<PortableTile> tiles;  // the first that is for a batch is taken; the last for any
};

struct KernelChoice {
  int64_t tile_q;  // of the portable kernel
  double portable_us, hopper_us;
  double apart_us;   // the portable kernel for what fits the second tile, Hopper's for the others
  int64_t few_rows;  // the most of those that fit the second tile; 0: there is one tile for all
};

class KernelChooser {
 public:
  KernelChooser(const KernelModel& model, const RequestGroup& group)
      : model_(model), group_(group) {
    int64_t most = 0;
    for (const PlanRequest& request : group.requests) {
      const int64_t rows = rows_of(request);
      most = std::max(most, rows);
      if (rows <= model.tile_q_second) few_rows_ = std::max(few_rows_, rows);
    }
    if (most <= model.tile_q_second) few_rows_ = 0;
    second_ = few_rows_ > 0 ? model.tile_q_second : 0;
  }

  KernelChoice choose() const {
    const PortableTile& tile = portable_tile();
    KernelChoice choice = {tile.tile_q, model_.portable_start, model_.hopper_start, INFINITY,
                           few_rows_};
    if (std::isinf(model_.hopper_start)) return choice;
    const int64_t second = second_;
    const Work many = work(tile.tile_q, second);
    Busy busy;
    if (second > 0) {
      const Share few = portable_share(work(second, -1), second);
      busy.add(few, speed_of_few());
      choice.apart_us = choice.portable_us + busy.us() + choice.hopper_us +
                        hopper_us(work(model_.hopper_tile_q, second));
      busy = {};
      busy.add(few, model_.second_speed);
    }
    busy.add(portable_share(many, tile.tile_q), tile.speed);
    choice.portable_us += busy.us();
    const bool is_same = tile.tile_q == model_.hopper_tile_q && second == 0;
    choice.hopper_us += hopper_us(is_same ? many : work(model_.hopper_tile_q, 0));
    return choice;
  }

 private:
  // The tiles of some requests, of one KV head.
  struct Work {
    double tiles, keys;  // of all tiles
    double longest;      // keys of a tile
  };

  // What they are for one multiprocessor; keys in units of 128.
  struct Share {
    double tiles, keys;
    double piece;  // the shortest that the longest tile is cut into
  };

  // The busiest multiprocessor, from the first key to the last.
  struct Busy {
    double shared = 0, uneven = 0, alone = 0;

    void add(const Share& share, const TileSpeed& speed) {
      shared += speed.per_128_keys * (share.tiles * speed.ends + share.keys);
      if (share.tiles == 0) return;
      const double piece = speed.per_128_keys * (share.piece + speed.ends);
      uneven = std::max(uneven, piece * speed.uneven);
      alone = std::max(alone, piece * speed.alone);
    }
    double us() const { return std::max(shared + uneven, alone); }
  };

  double hopper_us(const Work& work) const {
    Busy busy;
    busy.add(share(work, model_.hopper_tile_q, model_.hopper_tile_kv), model_.hopper_speed);
    return busy.us();
  }

  int64_t rows_of(const PlanRequest& request) const {
    return int64_t{request.qo_len} * model_.group_size;
  }

  // For the requests that have more rows than the second tile.
  const PortableTile& portable_tile() const {
    int64_t longest = 0, rows = 0, count = 0;
    for (const PlanRequest& request : group_.requests) {
      const int64_t its = rows_of(request);
      if (second_ > 0 && its <= second_) continue;
      longest = std::max(longest, its);
      rows += its;
      ++count;
    }
    const double mean = count > 0 ? static_cast<double>(rows) / count : 0;
    for (const PortableTile& tile : model_.tiles) {
      if (longest <= tile.most_rows || mean <= tile.mean_rows) return tile;
    }
    return model_.tiles.back();
  }

  // Of a launch of the requests that fit the second tile, which has a tile for these.
  const TileSpeed& speed_of_few() const {
    for (const PortableTile& tile : model_.tiles) {
      if (few_rows_ <= tile.most_rows) return tile.speed;
    }
    return model_.tiles.back().speed;
  }

  // Of the requests with more rows than `few`; negative: of those that fit the tile.
  Work work(int64_t tile_q, int64_t few) const {
    const double tokens = static_cast<double>(tile_q) / model_.group_size;  // of a tile
    const double seen = group_.window_left >= 0 ? group_.window_left + tokens : INFINITY;
    Work sum = {};
    double hidden = 0;
    for (const PlanRequest& request : group_.requests) {
      const int64_t rows = rows_of(request);
      if (few < 0 ? rows > tile_q : few > 0 && rows <= few) continue;
      const double tiles = static_cast<uint32_t>(rows + tile_q - 1) / static_cast<uint32_t>(tile_q);
      const double kv_len = std::min<double>(request.kv_len, seen);
      sum.tiles += tiles;
      sum.keys += tiles * kv_len;
      sum.longest = std::max(sum.longest, kv_len);
      if (!group_.causal) continue;
      // The last tile of a request sees these keys, and each one before it `tokens` fewer as soon
      // as the window is not full.
      const double first = kv_len - (int64_t{request.kv_len} - request.qo_len);
      const double fewer = std::min(tiles, std::max(first / tokens, 0.0));
      hidden += fewer * std::max(fewer - 1, 0.0);
    }
    sum.keys -= std::min(0.5 * tokens * hidden, 0.5 * sum.keys);
    return sum;
  }

  Share portable_share(const Work& work, int64_t tile_q) const {
    return share(work, tile_q, model_.portable_tile_kv);
  }
  Share share(const Work& work, int64_t tile_q, int64_t tile_kv) const {
    // No part of a tile is shorter than TileCost::min_piece, so that none is twice as long.
    const int64_t least = std::max(2 * tile_kv, 4 * tile_q);
    const double scale = static_cast<double>(model_.num_kv_heads) / model_.num_sms;
    const double piece = std::min<double>(work.longest, 2 * least - tile_kv);
    return {work.tiles * scale, work.keys * scale / 128, piece / 128};
  }

  const KernelModel& model_;
  const RequestGroup& group_;
  int64_t few_rows_ = 0;
  int64_t second_;  // the second tile, if some requests fit it and others do not
};

}  // namespace flashinfer
