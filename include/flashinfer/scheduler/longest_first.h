// Deals parts of the work to columns of CTAs, the longest first. Plain C++; reuses its memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace flashinfer {

class LongestFirst {
 public:
  void clear() {
    order_.clear();
    forget_columns();
  }
  void forget_columns() { columns_.clear(); }

  bool is_sorted() const { return !order_.empty(); }
  bool is_dealt() const { return !columns_.empty(); }

  // Sorts parts by `cost`, to 1/1024 of the range from `least` to `most`; ties keep their order.
  template <typename Part>
  void sort(const std::vector<Part>& parts, int64_t least, int64_t most) {
    int shift = 0;
    while ((most - least) >> shift >= kBuckets) ++shift;
    const int64_t buckets = ((most - least) >> shift) + 1;
    starts_.assign(buckets + 1, 0);
    for (const Part& part : parts) ++starts_[((most - part.cost) >> shift) + 1];
    for (int64_t i = 0; i < buckets; ++i) starts_[i + 1] += starts_[i];
    const int32_t count = static_cast<int32_t>(parts.size());
    order_.resize(count);
    for (int32_t i = 0; i < count; ++i) {
      order_[starts_[(most - parts[i].cost) >> shift]++] = i;
    }
  }

  // Gives each sorted part to the column with the least cost so far. Returns the largest cost.
  template <typename Part>
  int64_t deal(const std::vector<Part>& parts, int64_t num_columns) {
    loads_.clear();
    columns_.resize(order_.size());
    int64_t longest = 0;
    for (size_t i = 0; i < order_.size(); ++i) {
      int64_t cost = parts[order_[i]].cost;
      if (static_cast<int64_t>(loads_.size()) < num_columns) {
        columns_[i] = static_cast<int32_t>(loads_.size());
        loads_.push_back(load_of(cost, columns_[i]));
        if (static_cast<int64_t>(loads_.size()) == num_columns) {
          std::make_heap(loads_.begin(), loads_.end(), std::greater<uint64_t>());
        }
      } else {
        columns_[i] = column_of(loads_.front());
        cost += cost_of(loads_.front());
        replace_least(load_of(cost, columns_[i]));
      }
      longest = std::max(longest, cost);
    }
    return longest;
  }

  // Visits the costs of the columns in ascending order; nothing can be dealt to them afterwards.
  template <typename Visit>
  void visit_loads(const Visit& visit) {
    std::sort(loads_.begin(), loads_.end());
    for (const uint64_t load : loads_) visit(cost_of(load));
  }

  // Index of the part at a position, and its column if parts were dealt.
  int32_t part(size_t position) const { return order_[position]; }
  int32_t column(size_t position) const { return columns_[position]; }

 private:
  static constexpr int64_t kBuckets = 1024;

  // Packs a column and its cost so far into one number, which orders columns by cost, then by
  // index. Costs are multiples of 16 and those of a plan add up to less than 2^52; indices are
  // below 2^15.
  static uint64_t load_of(int64_t cost, int64_t column) {
    return static_cast<uint64_t>(cost << 11 | column);
  }
  static int64_t cost_of(uint64_t load) { return static_cast<int64_t>(load >> 15 << 4); }
  static int32_t column_of(uint64_t load) { return static_cast<int32_t>(load & 0x7fff); }

  // The smaller child is chosen by arithmetic, since a branch on it is unpredictable.
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

  std::vector<int32_t> order_, columns_;  // by position
  std::vector<int32_t> starts_;
  std::vector<uint64_t> loads_;
};

}  // namespace flashinfer
