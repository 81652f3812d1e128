// Divides decode among CTAs by lengths in device memory: what a CTA of the attention or of the
// merge kernel does is found by one of its warps, or written down for all by device_plan.cuh.
//
// The tiles of the portable kernel stand in a row, each with the cost of its KV tiles and one more
// for starting it, but for the first one. The row is cut into one share of equal cost per column. A
// tile's pieces lie in consecutive columns, so that each piece follows from the tile and the
// column. Its slot is c + m for column c, where m numbers the merges.
//
// A few plain requests are cut into equal parts instead, with columns of their own, if that leaves
// no column more to do: requests of one length then end together, whole where columns suffice.
#pragma once

#include <cstdint>
#include <flashinfer/attention/device_plan_params.h>
#include <flashinfer/attention/kv_tiles.h>
#include <flashinfer/common/math.cuh>

namespace flashinfer {

struct PlannedTile {
  int32_t request, qo_begin, qo_len, kv_base, kv_len, row_begin, num_rows, kv_begin, kv_end;

  __device__ __forceinline__ int kv_tiles() const {
    return ceil_div(max(kv_end - kv_begin, 0), kTileKV);
  }
  // No cost: there is no such tile.
  __device__ __forceinline__ int cost() const { return num_rows > 0 ? kv_tiles() + 1 : 0; }
};

// Tile `index` where params.plain_rows says that each request has one. `length`: as it was read.
__device__ __forceinline__ PlannedTile plain_tile(const DevicePlanParams& params, int index,
                                                  int length) {
  const int kv_len = min(max(length, 0), params.most_kv_len);
  const int kv_base = index * params.pages_per_request;
  return {index, index * params.qo_len, params.qo_len, kv_base, kv_len, 0, params.plain_rows, 0,
          kv_len};
}

// Reads tile `index` of all that the longest requests would have.
__device__ __forceinline__ PlannedTile read_planned_tile(const DevicePlanParams& params,
                                                         int index) {
  if (params.plain_rows > 0) return plain_tile(params, index, params.kv_len[index]);
  const int group_size = params.group_size.divisor;
  PlannedTile tile;
  const int request = tile.request = params.tiles_per_request.divide(index);
  tile.qo_begin = request * params.qo_len;
  tile.qo_len = params.qo_len;
  if (params.qo_indptr != nullptr) {
    tile.qo_begin = min(max(params.qo_indptr[request], 0), params.qo_tokens);
    tile.qo_len = min(max(params.qo_indptr[request + 1] - tile.qo_begin, 0), params.qo_len);
  }
  tile.qo_len = min(tile.qo_len, params.qo_tokens - tile.qo_begin);
  int num_pages = params.pages_per_request;
  tile.kv_base = request * num_pages;
  if (params.kv_indptr != nullptr) {
    tile.kv_base = min(max(params.kv_indptr[request], 0), params.kv_entries);
    num_pages = min(max(params.kv_indptr[request + 1], tile.kv_base), params.kv_entries);
    num_pages -= tile.kv_base;
  }
  const int64_t room = int64_t{num_pages} * params.page_size;
  int64_t length = room;
  if (params.kv_len != nullptr) {
    length = params.kv_len[request];
  } else if (num_pages > 0) {
    length = room - params.page_size + params.last_page_len[request];
  }
  tile.kv_len = static_cast<int32_t>(min(max(length, int64_t{0}), min(room, int64_t{INT32_MAX})));

  tile.row_begin =
      (index - request * static_cast<int>(params.tiles_per_request.divisor)) * params.tile_q;
  tile.num_rows = min(tile.qo_len * group_size - tile.row_begin, params.tile_q);
  const int shift = tile.kv_len - tile.qo_len;  // position of a query minus its index
  tile.kv_begin = 0;
  tile.kv_end = tile.kv_len;
  if (params.causal) {
    const int last = params.group_size.divide(max(tile.row_begin + tile.num_rows - 1, 0));
    tile.kv_end = min(tile.kv_end, last + shift + 1);
  }
  if (params.window_left >= 0) {
    const int first =
        static_cast<int>(params.group_size.divide(tile.row_begin)) + shift - params.window_left;
    tile.kv_begin = max(first, 0) & -kTileKV;
  }
  if (tile.kv_begin >= tile.kv_end) tile.kv_begin = tile.kv_end = 0;
  return tile;
}

// The columns that a tile lies in, and where it is cut.
struct TileColumns {
  static constexpr int kLeastPiece = 2;  // KV tiles
  int start, num_tiles, share, first, last, least = kLeastPiece;

  // A tile in columns first ... last that it has for itself: `share` KV tiles in each, and what is
  // left in the last one.
  __device__ __forceinline__ static TileColumns own(int num_tiles, int share, int first, int last) {
    return {first * share, num_tiles, share, first, last, 1};
  }

  // `start`: where the tile's KV tiles begin in the row.
  __device__ __forceinline__ TileColumns(int start, int num_tiles, int share, int first, int last,
                                         int least)
      : start(start), num_tiles(num_tiles), share(share), first(first), last(last), least(least) {}
  __device__ __forceinline__ TileColumns(int start, int num_tiles, int share)
      : start(start), num_tiles(num_tiles), share(share) {
    const float reciprocal = __fdividef(1.f, static_cast<float>(share));
    first = quotient(max(start - 1, 0), share, reciprocal);
    last = quotient(max(start + num_tiles - 1, 0), share, reciprocal);
    if (first < last && cut(first + 1) == 0) ++first;
    if (first < last && cut(last) == num_tiles) --last;
  }
  // tiles / share. Columns are so few that the quotient is one off at most.
  __device__ __forceinline__ static int quotient(int tiles, int share, float reciprocal) {
    const int column = static_cast<int>(static_cast<float>(tiles) * reciprocal);
    const int rest = tiles - column * share;
    return column + (rest >= share ? 1 : 0) - (rest < 0 ? 1 : 0);
  }
  // KV tiles before `column`. Pieces that are hardly worth a start go to their neighbours.
  __device__ __forceinline__ int cut(int column) const {
    const int tiles = column * share - start;
    if (tiles < least) return 0;
    return tiles > num_tiles - least ? num_tiles : tiles;
  }
};

// A tile in the row.
struct PlacedTile {
  int index;   // for read_planned_tile(); negative: there is none
  int number;  // of the tiles that exist
  int start;   // where its KV tiles begin
};

// A piece's place in lists and workspaces follows from its tile and these.
struct RowTotals {
  int most;       // tiles that the longest requests would have
  int num_tiles;  // that exist
  int share;      // of a column

  // A column ends in at most one tile that continues; with few tiles there are fewer merges.
  __device__ __forceinline__ bool has_merges_by_tile(const DevicePlanParams& params) const {
    return num_tiles <= params.num_merges;
  }
  __device__ __forceinline__ int merge_of(const DevicePlanParams& params, const PlacedTile& tile,
                                          const TileColumns& in) const {
    return has_merges_by_tile(params) ? tile.number : in.first;
  }
};

// Whether no lane of a warp has more than one tile, each of a plain request.
__device__ __forceinline__ bool all_by_lanes(const DevicePlanParams& params) {
  return params.plain_rows > 0 && params.batch_size <= 32;
}

// Then, the length of the lane's request. It may be read while an earlier grid still writes it, as
// a guess, and so comes from L2 each time.
__device__ __forceinline__ int lane_length(const DevicePlanParams& params) {
  const int lane_idx = threadIdx.x % 32;
  const volatile int32_t* const lengths = params.kv_len;
  return lane_idx < params.batch_size ? lengths[lane_idx] : 0;
}

// The row, as the lanes of a warp know it: each lane has some tiles that follow each other.
class TileRow {
 public:
  // `own_length`: of the lane's request where all_by_lanes(), as lane_length() has read it.
  __device__ __forceinline__ TileRow(const DevicePlanParams& params, int own_length)
      : params_(&params) {
    constexpr int kLeastShare = 4;  // KV tiles; with less, merging costs more than a part saves
    const int lane_idx = threadIdx.x % 32;
    totals.most = params.batch_size * static_cast<int>(params.tiles_per_request.divisor);
    per_lane_ = ceil_div(totals.most, 32);
    own_ = {0, 0};
    const int begin = lane_idx * per_lane_, end = min(begin + per_lane_, totals.most);
#pragma unroll 1
    for (int index = begin; index < end; ++index) {
      kept_ = all_by_lanes(params) ? plain_tile(params, index, own_length)
                                   : read_planned_tile(params, index);
      own_.add(kept_.cost());
    }
    const int lanes = min(totals.most, 32);
    Sum sum = own_;
    for (int distance = 1; distance < lanes; distance *= 2) {
      const int tiles = __shfl_up_sync(0xffffffffu, sum.tiles, distance);
      const int cost = __shfl_up_sync(0xffffffffu, sum.cost, distance);
      if (lane_idx >= distance) sum.tiles += tiles, sum.cost += cost;
    }
    before_ = {sum.tiles - own_.tiles, sum.cost - own_.cost};
    totals.num_tiles = __shfl_sync(0xffffffffu, sum.tiles, lanes - 1);
    const int length = __shfl_sync(0xffffffffu, sum.cost, lanes - 1) - 1;
    const int share = params.by_columns.divide(max(length, 0) + params.num_columns - 1);
    totals.share = max(share, kLeastShare);
    if (is_by_lanes() && totals.num_tiles <= params.num_columns) {
      cut_evenly(max(length, 0) + 1 - totals.num_tiles, lanes);
    }
  }

  // The tile in which the column begins.
  __device__ __forceinline__ PlacedTile first_of_column(int column) const {
    const int position = column == 0 ? -1 : column * totals.share;  // the row begins with a start
    return find(before_.cost - 1 <= position && position < before_.cost - 1 + own_.cost,
                [&](const Sum& sum, int cost) { return position < sum.cost - 1 + cost; });
  }

  __device__ __forceinline__ PlacedTile tile(int number) const {
    return find(before_.tiles <= number && number < before_.tiles + own_.tiles,
                [&](const Sum& sum, int) { return sum.tiles == number; });
  }

  // Tile `index`, which all lanes ask for. Where no lane has two, it is not read again.
  __device__ __forceinline__ PlannedTile read(int index) const {
    if (per_lane_ > 1) return read_planned_tile(*params_, index);
    PlannedTile tile;
    const auto from = [&](int value) { return __shfl_sync(0xffffffffu, value, index); };
    if (params_->plain_rows > 0) return plain_tile(*params_, index, from(kept_.kv_len));
    tile.request = from(kept_.request);
    tile.qo_begin = from(kept_.qo_begin), tile.qo_len = from(kept_.qo_len);
    tile.kv_base = from(kept_.kv_base), tile.kv_len = from(kept_.kv_len);
    tile.row_begin = from(kept_.row_begin), tile.num_rows = from(kept_.num_rows);
    tile.kv_begin = from(kept_.kv_begin), tile.kv_end = from(kept_.kv_end);
    return tile;
  }

  // Whether a lane has no more than one tile, of a plain request: its own place in the row then
  // says all about it, and no lane asks another.
  __device__ __forceinline__ bool is_by_lanes() const { return all_by_lanes(*params_); }
  // Then the lane's tile, and its columns; those of a lane without a tile hold no column.
  __device__ __forceinline__ const PlannedTile& own_tile() const { return kept_; }
  __device__ __forceinline__ PlacedTile own_place() const {
    return {static_cast<int>(threadIdx.x % 32), before_.tiles, before_.cost};
  }
  __device__ __forceinline__ TileColumns own_columns() const {
    if (is_even_) return TileColumns::own(own_.cost - 1, totals.share, first_, last_);
    TileColumns in(before_.cost, own_.cost - 1, totals.share);
    if (own_.cost == 0) in.first = 1, in.last = 0;
    return in;
  }

  RowTotals totals;

 private:
  struct Sum {
    int tiles, cost;
    __device__ __forceinline__ void add(int more) {
      tiles += more > 0 ? 1 : 0;
      cost += more;
    }
  };

  // Looks for the least part for which the columns suffice, all of which have at most one. The
  // row's longest columns are as long as its share and one more start.
  __device__ __forceinline__ void cut_evenly(int kv_tiles, int lanes) {
    const int columns = params_->num_columns, lane_idx = threadIdx.x % 32;
    int part = params_->by_columns.divide(kv_tiles + columns - 1);
    part = max(part, TileColumns::kLeastPiece);
#pragma unroll 1
    for (; part <= totals.share + 1; ++part) {
      const float reciprocal = __fdividef(1.f, static_cast<float>(part));
      const int before_last = TileColumns::quotient(max(own_.cost - 2, 0), part, reciprocal);
      const int parts = own_.cost > 0 ? before_last + 1 : 0;
      int sum = parts;
      for (int distance = 1; distance < lanes; distance *= 2) {
        const int more = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane_idx >= distance) sum += more;
      }
      if (__shfl_sync(0xffffffffu, sum, lanes - 1) > columns) continue;
      is_even_ = true;
      totals.share = part;
      first_ = sum - parts, last_ = sum - 1;
      return;
    }
  }

  // The first tile of the lane that `has` it for which is_it(sum of what is before it, its cost).
  template <typename Test>
  __device__ __forceinline__ PlacedTile find(bool has, const Test& is_it) const {
    const uint32_t lanes = __ballot_sync(0xffffffffu, has);
    if (lanes == 0) return {-1, 0, 0};
    PlacedTile found = {-1, 0, 0};
    if (has) {
      Sum sum = before_;
      int index = threadIdx.x % 32 * per_lane_;
#pragma unroll 1
      for (; per_lane_ > 1; ++index) {
        const int cost = read_planned_tile(*params_, index).cost();
        if (cost > 0 && is_it(sum, cost)) break;
        sum.add(cost);
      }
      found = {index, sum.tiles, sum.cost};
    }
    const int lane = __ffs(lanes) - 1;
    return {__shfl_sync(0xffffffffu, found.index, lane),
            __shfl_sync(0xffffffffu, found.number, lane),
            __shfl_sync(0xffffffffu, found.start, lane)};
  }

  const DevicePlanParams* params_;
  PlannedTile kept_ = {};  // the lane's last tile
  Sum own_, before_;
  int per_lane_;
  bool is_even_ = false;  // tiles have columns of their own, the lane's tile these:
  int first_ = 1, last_ = 0;
};

// The items of a column, one after the other.
class ColumnItems {
 public:
  __device__ __forceinline__ ColumnItems(const DevicePlanParams& params, const TileRow& row,
                                         int column)
      : params_(&params), row_(row), column_(column), totals_(row.totals), in_(row.own_columns()) {
    if (row.is_by_lanes()) {
      lanes_ = __ballot_sync(0xffffffffu, in_.first <= column && column <= in_.last);
    } else {
      next_ = row.first_of_column(column);
    }
  }

  // The lane that knows what next() has set.
  __device__ __forceinline__ int owner() const { return owner_; }

  // Sets the next item, all but its place in a list, and its tile's number; false: there is none.
  __device__ __forceinline__ bool next(WorkItem& item, int& number) {
    if (row_.is_by_lanes()) {
      if (lanes_ == 0) return false;
      owner_ = __ffs(lanes_) - 1;
      lanes_ &= lanes_ - 1;
      number = owner_;
      set_item(item, row_.own_tile(), row_.own_place(), in_);
      return true;
    }
#pragma unroll 1
    while (may_have_next()) {
      const PlacedTile placed = next_;
      const PlannedTile tile = row_.read(placed.index);
      const int cost = tile.cost();
      next_ = {placed.index + 1, placed.number + (cost > 0 ? 1 : 0), placed.start + cost};
      if (cost == 0) continue;
      const TileColumns in(placed.start, tile.kv_tiles(), totals_.share);
      if (in.first > column_) return false;
      if (in.last < column_) continue;
      if (in.last > column_) next_.index = -1;
      number = placed.number;
      set_item(item, tile, placed, in);
      return true;
    }
    return false;
  }

  // By lanes, the next item of these lanes; a later object goes on with those that are left.
  __device__ __forceinline__ bool next_of(uint32_t lanes, WorkItem& item, int& number) {
    lanes_ &= lanes;
    return next(item, number);
  }
  __device__ __forceinline__ uint32_t lanes_left() const { return lanes_; }

  // If not, there is no further item.
  __device__ __forceinline__ bool may_have_next() const {
    if (row_.is_by_lanes()) return lanes_ != 0;
    return 0 <= next_.index && next_.index < totals_.most;
  }

 private:
  // The column's piece of a tile.
  __device__ __forceinline__ void set_item(WorkItem& item, const PlannedTile& tile,
                                           const PlacedTile& placed, const TileColumns& in) const {
    item.request = tile.request;
    item.kind = 0;
    item.qo_begin = tile.qo_begin;
    item.qo_len = tile.qo_len;
    item.kv_len = tile.kv_len;
    item.kv_base = tile.kv_base;
    item.row_begin = tile.row_begin;
    item.kv_begin = tile.kv_begin;
    item.kv_end = tile.kv_end;
    if (in.first < column_) item.kv_begin += in.cut(column_) * kTileKV;
    if (column_ < in.last) item.kv_end = tile.kv_begin + in.cut(column_ + 1) * kTileKV;
    const bool is_split = in.first < in.last;
    item.partial_slot = is_split ? column_ + totals_.merge_of(*params_, placed, in) : -1;
    item.next = -1;
    item.merge_or_taken = 0;
  }

  const DevicePlanParams* params_;
  TileRow row_;
  int column_;
  RowTotals totals_;
  TileColumns in_;        // of the lane's tile
  uint32_t lanes_ = 0;    // whose tiles follow, by lanes
  PlacedTile next_ = {};  // otherwise
  int owner_ = 0;
};

// Merge `number`; without rows if there is nothing to merge.
__device__ __forceinline__ MergeItem find_merge(const DevicePlanParams& params, int number) {
  const TileRow row(params, all_by_lanes(params) ? lane_length(params) : 0);
  const RowTotals& totals = row.totals;
  MergeItem merge = {};
  if (row.is_by_lanes()) {
    const TileColumns in = row.own_columns();
    const bool is_own =
        in.first < in.last && totals.merge_of(params, row.own_place(), in) == number;
    const uint32_t lanes = __ballot_sync(0xffffffffu, is_own);
    if (lanes == 0) return merge;
    const int lane = __ffs(lanes) - 1;
    const PlannedTile tile = row.read(lane);
    merge.request = tile.request;
    merge.qo_begin = tile.qo_begin;
    merge.qo_len = tile.qo_len;
    merge.num_rows = tile.num_rows;
    merge.slot_begin = __shfl_sync(0xffffffffu, in.first, lane) + number;
    merge.slot_end = __shfl_sync(0xffffffffu, in.last, lane) + number + 1;
    merge.kv_len = tile.kv_len;
    return merge;
  }
  // Without a number, it is the tile in which column `number` ends and the next one begins.
  const PlacedTile placed =
      totals.has_merges_by_tile(params) ? row.tile(number) : row.first_of_column(number + 1);
  if (placed.index < 0) return merge;
  const PlannedTile tile = row.read(placed.index);
  const TileColumns in(placed.start, tile.kv_tiles(), totals.share);
  if (in.first == in.last || totals.merge_of(params, placed, in) != number) return merge;
  merge.request = tile.request;
  merge.qo_begin = tile.qo_begin;
  merge.qo_len = tile.qo_len;
  merge.row_begin = tile.row_begin;
  merge.num_rows = tile.num_rows;
  merge.slot_begin = in.first + number;
  merge.slot_end = in.last + number + 1;
  merge.kv_len = tile.kv_len;
  return merge;
}

}  // namespace flashinfer
