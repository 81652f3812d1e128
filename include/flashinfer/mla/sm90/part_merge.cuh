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

#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/sm90/few_part_merge.cuh>
#include <flashinfer/mla/sm90/many_part_merge.cuh>
#include <flashinfer/mla/sm90/merge_share.cuh>
#include <flashinfer/mla/sm90/share.cuh>
#include <flashinfer/mla/sm90/tile.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/progress.cuh>

namespace flashinfer {

// Called by the 256 threads that multiply.
template <typename Tile>
class MlaPartMerge {
  // The counter of parts has three numbers: parts that are there, CTAs that wait, and of them those
  // that have seen all parts.
  static constexpr uint32_t kPart = 1, kWaiting = 1 << 10, kSeen = 1 << 20, kMask = 1023;
  static constexpr int kSeenThreads = 64;  // of the first warp and of the one that counts it
  static constexpr int kCounter = 128;     // the thread that counts starts

 public:
  __device__ __forceinline__ MlaPartMerge(const MlaParams& params, MlaControl& control,
                                          uint32_t shared)
      : params_(params), control_(control), shared_(shared) {}

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
    if (threadIdx.x == 0) {
      control_.share_count = 0;
      control_.waited_for = -1;
      if (number >= 0) take_part(number, control_.last_merge.num_parts, true);
    }
    if (threadIdx.x < 32) {
      __syncwarp();
      ptx::named_barrier_arrive(kPartsSeen, kSeenThreads);
    }
    synchronize();
    if (control_.share_count != 0) {
      merge(control_.last_merge, control_.share_index, control_.share_count);
    }
    // Not in a loop with the one above, for which more registers are spilled where caches have 8
    // bits.
    if (control_.complete_merge >= 0) merge(params_.merges[control_.complete_merge], 0, 1);
  }

  // The same time in a warp that multiplies nothing: counts that the CTA has seen all parts, which
  // takes a trip to L2.
  __device__ __forceinline__ void count_seen() const {
    if (params_.counters == nullptr) return;
    ptx::named_barrier_sync(kPartsSeen, kSeenThreads);
    const int number = control_.waited_for;
    if (number < 0 || threadIdx.x % 32 != 0) return;
    const uint32_t seen = ptx::count_events(&params_.counters[number].parts, kSeen);
    if ((seen / kSeen & kMask) + 1 == control_.share_count) {
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

  // Announces the part, and finds out which share of the rows the CTA merges.
  __device__ __forceinline__ void take_part(int merge, uint32_t num_parts, bool is_last) const {
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
      control_.waited_for = merge;
      uint32_t now = before + kPart + kWaiting;
      while ((now & kMask) != num_parts) now = ptx::see_count(counter);
      control_.share_count = now / kWaiting & kMask;
    } else if (is_complete && waiting == 0) {
      control_.share_count = 1;
      *counters = {0, 0};  // for the next launch
    }
  }

  __device__ __forceinline__ void merge(const MlaMerge& merge, int first, int step) const {
    const MlaMergeShare share = {merge, first, step, mla_tile_rows(params_, merge)};
    if (merge.num_parts <= MlaFewPartMerge<Tile>::kMostParts) {
      MlaFewPartMerge<Tile>(params_, share, shared_).run(synchronize);
    } else {
      MlaManyPartMerge<Tile>(params_, share, shared_).run(synchronize);
    }
  }

  const MlaParams& params_;
  MlaControl& control_;
  const uint32_t shared_;
};

}  // namespace flashinfer
