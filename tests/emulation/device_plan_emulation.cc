// The planner on the device, emulated on the CPU: random lengths, and lengths that no batch has.
// Each visible key of each tile is in exactly one item, each column ends near its share, and parts
// of a tile have slots and a merge of their own.
//
//   device_plan_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/attention/device_plan.cuh>

#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace flashinfer {
namespace {

struct Case {
  DevicePlanParams params = {};
  std::vector<int32_t> qo_indptr, kv_indptr, kv_len, last_page_len;
  std::vector<WorkItem> items;
  std::vector<MergeItem> merges;
  bool is_sane = true;
};

std::mt19937 engine(5);

int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
bool one_in(int n) { return integer(1, n) == 1; }

void draw(Case& c) {
  DevicePlanParams& p = c.params;
  p.batch_size = one_in(5) ? integer(200, 400) : integer(1, 20);
  const int group_size = integer(1, 8);
  p.group_size = FastDivisor(group_size);
  p.qo_len = one_in(2) ? 1 : integer(1, 20);
  p.tile_q = one_in(2) ? 8 : 64;
  p.page_size = one_in(3) ? 1 : 1 << integer(2, 6);
  p.causal = p.qo_len > 1;
  p.window_left = one_in(3) ? integer(0, 600) : -1;
  p.num_columns = integer(1, 140);
  p.pages_per_request = integer(1, one_in(6) ? 20000 : 300);
  const bool has_table = one_in(2), is_ragged = p.causal && one_in(2);
  c.is_sane = !one_in(6);
  int rows = 0, pages = 0;
  for (int i = 0; i < p.batch_size; ++i) {
    c.qo_indptr.push_back(rows);
    rows += one_in(3) ? 0 : integer(0, p.qo_len);
    c.kv_indptr.push_back(pages);
    const int count = one_in(4) ? 0 : integer(0, p.pages_per_request);
    pages += has_table ? p.pages_per_request : count;
    c.kv_len.push_back(integer(0, (has_table ? p.pages_per_request : count) * p.page_size));
    c.last_page_len.push_back(integer(1, p.page_size));
  }
  if (has_table && one_in(3)) c.kv_len.assign(p.batch_size, c.kv_len[0]);
  c.qo_indptr.push_back(rows);
  c.kv_indptr.push_back(pages);
  p.kv_entries = pages;
  p.qo_tokens = is_ragged ? rows : p.batch_size * p.qo_len;
  if (!c.is_sane) {
    for (auto* numbers : {&c.qo_indptr, &c.kv_indptr, &c.kv_len, &c.last_page_len}) {
      for (int32_t& number : *numbers) {
        if (one_in(3)) number = integer(-1 << 30, 1 << 30);
      }
    }
  }
  if (is_ragged) p.qo_indptr = c.qo_indptr.data();
  if (!has_table) p.kv_indptr = c.kv_indptr.data();
  if (has_table || one_in(2)) {
    p.kv_len = c.kv_len.data();
  } else {
    p.last_page_len = c.last_page_len.data();
  }
  p.tiles_per_request = FastDivisor(ceil_div(p.qo_len * group_size, p.tile_q));
  const int tiles = p.batch_size * p.tiles_per_request.divisor;
  p.num_merges = std::min(p.num_columns - 1, tiles);
  c.items.resize(p.num_columns + tiles, WorkItem{-7, -7, -7, -7, -7, -7, -7, -7, -7, -7, -7, -7});
  c.merges.resize(p.num_merges);
  p.items = c.items.data();
  p.merges = c.merges.data();
  finish_device_plan(p);
}

int complain(const char* what, int64_t got, int64_t expected) {
  std::printf("%s: got %lld, expected %lld\n", what, static_cast<long long>(got),
              static_cast<long long>(expected));
  return 1;
}

struct Part {
  int kv_begin, kv_end, slot;
};
using Tiles = std::map<std::pair<int, int>, std::vector<Part>>;  // (request, row) to its parts

// Walks all columns; returns the largest cost of one, or -1 if a list leads out of the items.
int64_t walk(const Case& c, Tiles& tiles) {
  int64_t most = 0;
  size_t visited = 0;
  for (int column = 0; column < c.params.num_columns; ++column) {
    int64_t cost = 0;
    for (int i = column; i >= 0; i = c.items[i].next) {
      const WorkItem& item = c.items[i];
      if (item.request < 0 && i == column && item.next < 0) break;
      if (++visited > c.items.size() || item.request < 0 || item.kind != 0) return -1;
      if (item.next >= static_cast<int>(c.items.size())) return -1;
      if (item.qo_begin < 0 || item.qo_begin + item.qo_len > c.params.qo_tokens) return -1;
      const int pages = ceil_div(item.kv_len, c.params.page_size);
      if (item.kv_base < 0 || item.kv_base + pages > c.params.kv_entries) return -1;
      if (item.kv_begin < 0 || item.kv_end > item.kv_len) return -1;
      tiles[{item.request, item.row_begin}].push_back(
          {item.kv_begin, item.kv_end, item.partial_slot});
      cost += ceil_div(item.kv_end - item.kv_begin, kTileKV) + 1;
    }
    most = std::max(most, cost);
  }
  return most;
}

int check_parts(const Case& c, const std::vector<Part>& parts, std::pair<int, int> tile, int begin,
                int end, int rows, std::set<int>& slots) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].kv_begin != begin) return complain("part begins", parts[i].kv_begin, begin);
    begin = parts[i].kv_end;
    const int slot = parts[i].slot;
    if (parts.size() == 1 && slot != -1) return complain("slot of a whole tile", slot, -1);
    if (parts.size() == 1) continue;
    const int kv_tiles = ceil_div(parts[i].kv_end - parts[i].kv_begin, kTileKV);
    const bool may_be_even = c.params.plain_rows > 0 && i + 1 == parts.size();
    const int least = may_be_even ? 1 : 2;
    if (kv_tiles < least) return complain("KV tiles of a part", kv_tiles, least);
    if (slot != parts[0].slot + static_cast<int>(i)) return complain("slot", slot, i);
    if (slot < 0 || slot >= c.params.num_columns - 1 + c.params.num_merges) {
      return complain("slot beyond the workspace", slot, c.params.num_merges);
    }
    if (!slots.insert(slot).second) return complain("slot used twice", slot, -1);
  }
  if (begin != end) return complain("keys end", begin, end);
  if (parts.size() == 1) return 0;
  for (const MergeItem& merge : c.merges) {
    if (merge.num_rows == 0 || merge.slot_begin != parts[0].slot) continue;
    if (merge.slot_end != parts[0].slot + static_cast<int>(parts.size())) break;
    if (merge.request == tile.first && merge.row_begin == tile.second && merge.num_rows == rows) {
      return 0;
    }
  }
  return complain("merge of slot", -1, parts[0].slot);
}

int check(const Case& c) {
  const DevicePlanParams& p = c.params;
  Tiles tiles;
  const int64_t most = walk(c, tiles);
  if (most < 0) return complain("lists lead out of bounds", most, 0);
  if (!c.is_sane) return 0;
  size_t num_tiles = 0;
  int64_t total = 0, merges = 0;
  std::set<int> slots;
  for (int request = 0; request < p.batch_size; ++request) {
    const int qo_len = p.qo_indptr ? c.qo_indptr[request + 1] - c.qo_indptr[request] : p.qo_len;
    const int pages = c.kv_indptr[request + 1] - c.kv_indptr[request];
    int kv_len = pages ? (pages - 1) * p.page_size + c.last_page_len[request] : 0;
    if (p.kv_len) kv_len = c.kv_len[request];
    const int group_size = p.group_size.divisor, all_rows = qo_len * group_size;
    for (int row = 0; row < all_rows; row += p.tile_q, ++num_tiles) {
      const int rows = std::min(p.tile_q, all_rows - row);
      int begin = kv_len, end = 0;  // keys that any row sees
      for (int r = row; r < row + rows; ++r) {
        const int position = r / group_size + kv_len - qo_len;
        const int last = p.causal ? std::min(kv_len - 1, position) : kv_len - 1;
        const int first = p.window_left >= 0 ? std::max(0, position - p.window_left) : 0;
        if (first > last) continue;
        begin = std::min(begin, first), end = std::max(end, last + 1);
      }
      begin = begin / kTileKV * kTileKV;
      if (end == 0) begin = 0;
      const auto found = tiles.find({request, row});
      if (found == tiles.end()) return complain("items of request", 0, request);
      if (check_parts(c, found->second, found->first, begin, end, rows, slots)) return 1;
      total += ceil_div(end - begin, kTileKV) + 1;
      merges += found->second.size() > 1;
    }
  }
  if (tiles.size() != num_tiles) return complain("tiles", tiles.size(), num_tiles);
  int64_t written = 0;
  for (const MergeItem& merge : c.merges) written += merge.num_rows != 0;
  if (written != merges) return complain("merges", written, merges);
  const int64_t share = std::max<int64_t>(4, ceil_div(total, int64_t{p.num_columns}));
  if (most > share + 5) return complain("longest column", most, share);
  if (p.plain_rows == 0 || p.batch_size > 32 || p.batch_size > p.num_columns) return 0;
  // Equal parts of few requests, if they are hardly longer than a share.
  const int64_t in_a_row = std::max<int64_t>(4, ceil_div(total - 1, int64_t{p.num_columns}));
  const int64_t least = ceil_div(total - p.batch_size, int64_t{p.num_columns});
  for (int64_t part = std::max<int64_t>(2, least); part <= in_a_row + 1; ++part) {
    int64_t parts = 0;
    for (const int32_t kv_len : c.kv_len) {
      parts += std::max<int64_t>(1, ceil_div<int64_t>(ceil_div(kv_len, kTileKV), part));
    }
    if (parts > p.num_columns) continue;
    return most > part + 1 ? complain("longest of equal parts", most, part + 1) : 0;
  }
  return 0;
}

int run(int cases) {
  for (int i = 0; i < cases; ++i) {
    Case c;
    draw(c);
    const auto thread = [&] { device_plan_kernel(c.params); };
    const int columns = std::max(c.params.num_columns, c.params.num_merges);
    for (int b = 0; b < ceil_div(columns, kPlanThreads / 32); ++b) {
      blockIdx.x = b;
      emulation::block.run(kPlanThreads, 1, thread, [](int t) { threadIdx.x = t; });
    }
    if (check(c)) {
      std::printf("in case %d\n", i);
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace flashinfer

int main(int, char** argv) { return flashinfer::run(std::atoi(argv[1])); }
