// Merges the parts of tiles whose KV range was cut, at the end of the kernel that makes them.
//
// CTAs count the parts that are there. A CTA that has nothing else to do waits for the other parts
// of its last tile, and those that wait share the tile's rows. It waits only if all CTAs that bring
// a part have started, so that none needs the room of one that waits; otherwise the CTA that brings
// the last part merges all rows. Parts are added up in the same order whoever does it: results
// repeat bit for bit.
//
// A launch ends with this, so that each trip to L2 counts: rows of all parts are copied to shared
// memory at once, and their weights are made meanwhile.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/row_end.cuh>
#include <flashinfer/mla/sm90/part_rows.cuh>
#include <flashinfer/mla/sm90/share.cuh>
#include <flashinfer/mla/sm90/tile.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/progress.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

// Called by the 256 threads that multiply.
template <typename Tile>
class MlaPartMerge {
  using O = typename Tile::O;
  static constexpr int kThreads = Tile::kConsumerThreads, kWarps = kThreads / 32;
  static constexpr int kRowBytes = Tile::kDimCkv * 2;
  static_assert(sizeof(O) == 2);
  // The counter of parts has three numbers: parts that are there, CTAs that wait, and of them those
  // that have seen all parts.
  static constexpr uint32_t kPart = 1, kWaiting = 1 << 10, kSeen = 1 << 20, kMask = 1023;
  static constexpr int kCounter = 128;  // the thread that counts starts

 public:
  __device__ __forceinline__ MlaPartMerge(const MlaParams& params, MlaControl& control,
                                          uint32_t shared)
      : params_(params),
        control_(control),
        shared_(shared),
        warp_idx_(threadIdx.x / 32),
        lane_idx_(threadIdx.x % 32) {}

  // The CTA counts its first and its last item; the others are whole tiles. A thread of the second
  // warpgroup does it, which waits for the first's logits anyway, and looks up the last one's
  // merge.
  __device__ __forceinline__ void count_start(const MlaShare& share) const {
    if (threadIdx.x == 0) control_.complete_merge = -1;
    if (params_.counters == nullptr || threadIdx.x != kCounter || share.begin == share.end) return;
    count_start(share.first);
    MlaWorkItem last = share.first;
    if (share.end - share.begin > 1) {
      last = params_.items[share.end - 1];
      count_start(last);
    }
    if (last.slot >= 0) control_.last_merge = params_.merges[last.merge];
  }

  // The item is written. Its part may be the last one that is there; then its rows are merged after
  // the CTA's last item.
  template <int kGroup>
  __device__ __forceinline__ void end_item(const MlaWorkItem& item) const {
    if (item.slot < 0 || params_.counters == nullptr) return;
    if constexpr (kGroup == 1) {
      ptx::named_barrier_arrive(kItemWritten, Tile::kConsumerThreads);
    } else {
      ptx::named_barrier_sync(kItemWritten, Tile::kConsumerThreads);
      if (threadIdx.x != 0) return;
      take_part(item.merge, params_.merges[item.merge].num_parts, false);
      if (control_.share_count != 0) control_.complete_merge = item.merge;
    }
  }

  // After all items. Not within the loop over items and no loops within loops of unknown length:
  // the compiler would hold the addresses of products in registers of threads, and move each anew
  // to where the tensor cores take it from.
  // `number`: the merge of the last item's part, or -1.
  __device__ __forceinline__ void end_last_item(int number) const {
    if (params_.counters == nullptr) return;
    synchronize();
    bool waited = false;
    if (threadIdx.x == 0) {
      control_.share_count = 0;
      if (number >= 0) waited = take_part(number, control_.last_merge.num_parts, true);
    }
    synchronize();
    uint32_t seen = 0;  // is not waited for while parts are added up
    if (waited) seen = ptx::count_events(&params_.counters[number].parts, kSeen);
    if (control_.share_count != 0) add_rows(control_.last_merge, share_of(control_.last_merge));
    if (control_.complete_merge >= 0) {
      const MlaMerge merge = params_.merges[control_.complete_merge];
      add_rows(merge, {0, 1, mla_tile_rows(params_, merge)});
    }
    if (waited && (seen / kSeen & kMask) + 1 == control_.share_count) {
      params_.counters[number] = {0, 0};  // for the next launch
    }
  }

 private:
  __device__ __forceinline__ void count_start(const MlaWorkItem& item) const {
    if (item.slot >= 0) ptx::count_event(&params_.counters[item.merge].started);
  }

  __device__ __forceinline__ static void synchronize() {
    ptx::named_barrier_sync(kItemEnd, Tile::kConsumerThreads);
  }

  // Announces the part, and finds out which share of the rows the CTA merges. Returns whether it
  // has waited for the other parts.
  __device__ __forceinline__ bool take_part(int merge, uint32_t num_parts, bool is_last) const {
    MlaMergeCounters* const counters = &params_.counters[merge];
    uint32_t* const counter = &counters->parts;
    const uint32_t started = is_last ? ptx::see_events(&counters->started) : 0;
    ptx::release();  // takes as long as what it waits for beside it
    const bool waits = started == num_parts;
    const uint32_t before = ptx::count_and_see(counter, kPart + (waits ? kWaiting : 0));
    const uint32_t waiting = before / kWaiting & kMask;
    const bool is_complete = (before & kMask) + 1 == num_parts;
    control_.share_index = waits ? waiting : 0;
    control_.share_count = 0;
    if (waits) {
      uint32_t now = before + kPart + kWaiting;
      while ((now & kMask) != num_parts) now = ptx::see_count(counter);
      control_.share_count = now / kWaiting & kMask;
    } else if (is_complete && waiting == 0) {
      control_.share_count = 1;
      *counters = {0, 0};  // for the next launch
    }
    return waits;
  }

  // ---- Rows ----

  // Rows first, first + step, ... of a tile.
  struct Rows {
    int first, step, count;
  };

  __device__ __forceinline__ Rows share_of(const MlaMerge& merge) const {
    const int step = control_.share_count, first = control_.share_index;
    return {first, step, max(0, (mla_tile_rows(params_, merge) - first + step - 1) / step)};
  }

  // In the place of queries and keys, which nobody needs after the CTA's last item, is room for a
  // row of many parts, or for some rows of few. A tile has at most as many parts as there are CTAs.
  static constexpr int kRoom = Tile::kOffsetWeights / kRowBytes;
  static constexpr int kPlaces = kRoom < kThreads ? kRoom : kThreads;  // a thread has one

  __device__ __forceinline__ uint32_t place_address(int place) const {
    return shared_ + place * kRowBytes;
  }
  // Weights of a row's parts lie in fours.
  __device__ __forceinline__ uint32_t weight_address(int row, int num_parts) const {
    return shared_ + Tile::kOffsetWeights + row * ceil_div(num_parts, 4) * 16;
  }

  __device__ __forceinline__ void add_rows(const MlaMerge& merge, const Rows& rows) const {
    const int most = kPlaces / merge.num_parts;
#pragma unroll 1
    for (int i = 0; i < rows.count; i += most) {
      const Rows some = {rows.first + i * rows.step, rows.step, min(most, rows.count - i)};
      copy(merge, some);
      synchronize();
      weigh(merge, some);
      ptx::cp_async_wait<0>();
      synchronize();
      if (rows.count < 4) {
        add<1>(merge, some);
      } else {
        add<4>(merge, some);
      }
      synchronize();  // the places are free
    }
  }

  // Asks for the rows of all parts; leaves the parts' LSEs where weights will be.
  __device__ __forceinline__ void copy(const MlaMerge& merge, const Rows& rows) const {
    const int num_places = rows.count * merge.num_parts, place = lane_idx_ * kWarps + warp_idx_;
    const int row = static_cast<unsigned>(place) / static_cast<unsigned>(merge.num_parts);
    const int part = place - row * merge.num_parts;
    const int slot_row =
        (merge.slot_begin + part * merge.slot_stride) * Tile::kRows + rows.first + row * rows.step;
    float lse = 0.f;
    if (place < num_places) lse = __ldcg(params_.partial_lse + slot_row);
    const char* const outputs = static_cast<const char*>(params_.partial_o) + lane_idx_ * 16;
#pragma unroll 1
    for (int i = 0; i * kWarps + warp_idx_ < num_places; ++i) {
      const char* source = outputs + int64_t{__shfl_sync(0xffffffffu, slot_row, i)} * kRowBytes;
      const uint32_t target = place_address(i * kWarps + warp_idx_) + lane_idx_ * 16;
#pragma unroll
      for (int bytes = 0; bytes < kRowBytes; bytes += 512) {
        ptx::cp_async_16(target + bytes, source + bytes, true);
      }
    }
    ptx::cp_async_commit();
    if (place < num_places) {
      ptx::store_shared_4(weight_address(row, merge.num_parts) + part * 4, __float_as_uint(lse));
    }
  }

  // Makes weights of LSEs, a warp for each row.
  __device__ __forceinline__ void weigh(const MlaMerge& merge, const Rows& rows) const {
#pragma unroll 1
    for (int i = warp_idx_; i < rows.count; i += kWarps) {
      const uint32_t weights = weight_address(i, merge.num_parts);
      const auto load = [&](int part) {
        return __uint_as_float(ptx::load_shared_4(weights + part * 4));
      };
      const auto store = [&](int part, float weight) {
        ptx::store_shared_4(weights + part * 4, __float_as_uint(weight));
      };
      float largest = -math::inf;
#pragma unroll 1
      for (int part = lane_idx_; part < merge.num_parts; part += 32) {
        largest = fmaxf(largest, load(part));
      }
      largest = over_lanes(largest, [](float a, float b) { return fmaxf(a, b); });
      const float reference = largest == -math::inf ? 0.f : largest;
      float sum = 0.f;
#pragma unroll 1
      for (int part = lane_idx_; part < merge.num_parts; part += 32) {
        const float weight = math::ptx_exp2(load(part) - reference);
        store(part, weight);
        sum += weight;
      }
      sum = over_lanes(sum, [](float a, float b) { return a + b; });
      const int row = rows.first + i * rows.step;
      const MlaRowEnd end(params_, merge.qo_begin, merge.row_begin + row, largest, sum);
      if (lane_idx_ == 0) end.write_lse(params_);
#pragma unroll 1
      for (int part = lane_idx_; part < merge.num_parts; part += 32) {
        store(part, load(part) * end.factor);
      }
    }
  }

  template <typename Combine>
  __device__ __forceinline__ static float over_lanes(float value, const Combine& combine) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
    }
    return value;
  }

  // Each thread has `kPairs` pairs of columns: one shares a row of many parts among all threads,
  // four have more rows at a time.
  template <int kPairs>
  __device__ __forceinline__ void add(const MlaMerge& merge, const Rows& rows) const {
    constexpr int kRowThreads = Tile::kDimCkv / 2 / kPairs;
    const int thread = threadIdx.x % kRowThreads;
#pragma unroll 1
    for (int i = threadIdx.x / kRowThreads; i < rows.count; i += kThreads / kRowThreads) {
      uint32_t weights = weight_address(i, merge.num_parts);
      uint32_t source = place_address(i * merge.num_parts) + thread * kPairs * 4;
      float sums[2 * kPairs] = {};
      int left = merge.num_parts;
#pragma unroll 2
      for (; left >= 4; left -= 4) {
        const uint4 four = ptx::load_shared_16(weights);
        const uint32_t of_parts[4] = {four.x, four.y, four.z, four.w};
        uint32_t pairs[4][kPairs];
#pragma unroll
        for (int k = 0; k < 4; ++k) load_pairs(source + k * kRowBytes, pairs[k]);
#pragma unroll
        for (int k = 0; k < 4; ++k) add_part(of_parts[k], pairs[k], sums);
        weights += 16;
        source += 4 * kRowBytes;
      }
#pragma unroll 1
      for (; left > 0; --left) {
        uint32_t pairs[kPairs];
        load_pairs(source, pairs);
        add_part(ptx::load_shared_4(weights), pairs, sums);
        weights += 4;
        source += kRowBytes;
      }
      const int row = merge.row_begin + rows.first + i * rows.step;
      O* const target = MlaRowPlace(params_, merge.qo_begin, row).template row<O>(params_);
      uint32_t words[kPairs];
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        words[k] = PackedPair<O>::pack(sums[2 * k], sums[2 * k + 1]);
      }
      if constexpr (kPairs == 1) {
        const int pair = Tile::kPartsAsHeld ? mla_part_pair(thread) : thread;
        reinterpret_cast<uint32_t*>(target)[pair] = words[0];
      } else {
        if constexpr (Tile::kPartsAsHeld) transpose_in_quad(words, lane_idx_);
        reinterpret_cast<uint4*>(target)[thread] = uint4{words[0], words[1], words[2], words[3]};
      }
    }
  }

  template <int kPairs>
  __device__ __forceinline__ static void load_pairs(uint32_t source, uint32_t (&pairs)[kPairs]) {
    if constexpr (kPairs == 1) {
      pairs[0] = ptx::load_shared_4(source);
    } else {
      const uint4 four = ptx::load_shared_16(source);
      pairs[0] = four.x, pairs[1] = four.y, pairs[2] = four.z, pairs[3] = four.w;
    }
  }

  template <int kPairs>
  __device__ __forceinline__ static void add_part(uint32_t weight, const uint32_t (&pairs)[kPairs],
                                                  float (&sums)[2 * kPairs]) {
#pragma unroll
    for (int e = 0; e < 2 * kPairs; ++e) {
      const float value = to_float(O{static_cast<uint16_t>(pairs[e / 2] >> e % 2 * 16)});
      sums[e] = fmaf(value, __uint_as_float(weight), sums[e]);
    }
  }

  const MlaParams& params_;
  MlaControl& control_;
  const uint32_t shared_;
  const int warp_idx_, lane_idx_;
};

}  // namespace flashinfer
