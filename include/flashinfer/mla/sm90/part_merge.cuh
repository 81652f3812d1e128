// Merges the parts of tiles whose KV range was cut, at the end of the kernel that makes them.
//
// CTAs count the parts that are there. A CTA that has nothing else to do waits for the other parts
// of its last tile, and those that wait share the tile's rows. It waits only if all CTAs that bring
// a part have started, so that none needs the room of one that waits; otherwise the CTA that brings
// the last part merges all rows. Parts are added up in the same order whoever does it: results
// repeat bit for bit.
//
// A launch ends with this, so that each trip to L2 counts: rows of all parts are copied to shared
// memory at once, and their weights are made meanwhile. A warp has rows of its own, or columns of
// all rows, and makes their weights itself.
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

  // In the place of queries and keys, which nobody needs after the CTA's last item, each warp has
  // room for what it adds up, and in the place of weights for theirs: no warp waits for another.
  static constexpr int kRoom = Tile::kOffsetWeights / kWarps;
  static constexpr int kWeights = Tile::kChunkBytes / 4 / kWarps;
  static constexpr int kMostWhole = 16;  // parts of a row that one warp adds up alone
  static_assert(kMostWhole * kRowBytes <= kRoom && kRoom % 16 == 0);

  __device__ __forceinline__ void add_rows(const MlaMerge& merge, const Rows& rows) const {
    if (rows.count < kWarps || merge.num_parts > kMostWhole) {
      add<kWarps>(merge, rows);
    } else {
      add<1>(merge, rows);
    }
  }

  // The warp has one of `kSlices` slices of the columns of every row, or every eighth row.
  template <int kSlices>
  __device__ __forceinline__ void add(const MlaMerge& merge, const Rows& rows) const {
    constexpr int kBytes = kRowBytes / kSlices;  // of a part of a row
    constexpr int kStep = kWarps / kSlices;
    const int slice = kSlices == 1 ? 0 : warp_idx_;
    const int num_weights = ceil_div(merge.num_parts, 4) * 4;  // of a row: they lie in fours
    const int most = min(kRoom / kBytes / merge.num_parts, kWeights / num_weights);
    const uint32_t weights = shared_ + Tile::kOffsetWeights + warp_idx_ * kWeights * 4;
    const uint32_t places = shared_ + warp_idx_ * kRoom;
#pragma unroll 1
    for (int i = kSlices == 1 ? warp_idx_ : 0; i < rows.count; i += most * kStep) {
      const Rows some = {rows.first + i * rows.step, rows.step * kStep,
                         min(most, (rows.count - i + kStep - 1) / kStep)};
      copy<kBytes>(merge, some, places, weights, slice);
#pragma unroll 1
      for (int k = 0; k < some.count; ++k) {
        if (k == 0) {
          ptx::cp_async_wait<1>();
          __syncwarp();
        }
        const int row = some.first + k * some.step;
        const float factor = weigh(merge, row, weights + k * num_weights * 4, slice == 0);
        if (k == 0) ptx::cp_async_wait<0>();
        __syncwarp();
        add_parts<kBytes>(merge, row, places + k * merge.num_parts * kBytes,
                          weights + k * num_weights * 4, slice, factor);
      }
      __syncwarp();  // the places are free
    }
  }

  // Asks for the LSEs of all parts of the rows, in the place of their weights, and for the warp's
  // columns of them.
  template <int kBytes>
  __device__ __forceinline__ void copy(const MlaMerge& merge, const Rows& rows, uint32_t places,
                                       uint32_t weights, int slice) const {
    constexpr int kLanes = kBytes / 16 < 32 ? kBytes / 16 : 32;  // that copy a part
    const int num_parts = merge.num_parts, stride = merge.slot_stride * Tile::kRows;
    const int first = merge.slot_begin * Tile::kRows + rows.first;
#pragma unroll 1
    for (int k = 0; k < rows.count; ++k) {
#pragma unroll 1
      for (int part = lane_idx_; part < num_parts; part += 32) {
        ptx::cp_async_4(weights + (k * ceil_div(num_parts, 4) * 4 + part) * 4,
                        params_.partial_lse + (first + k * rows.step + part * stride), true);
      }
    }
    ptx::cp_async_commit();
    const char* const own =
        static_cast<const char*>(params_.partial_o) + slice * kBytes + lane_idx_ % kLanes * 16;
#pragma unroll 1
    for (int k = 0; k < rows.count; ++k) {
#pragma unroll 2
      for (int part = lane_idx_ / kLanes; part < num_parts; part += 32 / kLanes) {
        const int slot_row = first + k * rows.step + part * stride;
        const char* const source = own + int64_t{slot_row} * kRowBytes;
        const uint32_t place = places + (k * num_parts + part) * kBytes + lane_idx_ % kLanes * 16;
#pragma unroll
        for (int bytes = 0; bytes < kBytes; bytes += kLanes * 16) {
          ptx::cp_async_16(place + bytes, source + bytes, true);
        }
      }
    }
    ptx::cp_async_commit();
  }

  // Makes weights of the LSEs of a row's parts. Lanes have one part each, or several lanes the same
  // ones. Returns the factor of the sum.
  __device__ __forceinline__ float weigh(const MlaMerge& merge, int row, uint32_t weights,
                                         bool writes_lse) const {
    int lanes = 1;
    while (lanes < merge.num_parts && lanes < 32) lanes *= 2;
    const int own = lane_idx_ & (lanes - 1);
    const auto load = [&](int part) {
      return part < merge.num_parts ? __uint_as_float(ptx::load_shared_4(weights + part * 4))
                                    : -math::inf;
    };
    float largest = -math::inf;
#pragma unroll 1
    for (int part = own; part - own < merge.num_parts; part += lanes) {
      largest = fmaxf(largest, load(part));
    }
#pragma unroll 1
    for (int i = lanes / 2; i > 0; i /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
    }
    const float reference = largest == -math::inf ? 0.f : largest;
    float sum = 0.f;
#pragma unroll 1
    for (int part = own; part - own < merge.num_parts; part += lanes) {
      const float weight = math::ptx_exp2(load(part) - reference);
      __syncwarp();  // all lanes that have the part have read it
      if (part < merge.num_parts) {
        ptx::store_shared_4(weights + part * 4, __float_as_uint(weight));
      }
      sum += weight;
    }
#pragma unroll 1
    for (int i = lanes / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    const MlaRowEnd end(params_, merge.qo_begin, merge.row_begin + row, largest, sum);
    if (writes_lse && lane_idx_ == 0) end.write_lse(params_);
    return end.factor;
  }

  // Adds up the warp's columns of a row's parts, which lie in `source`.
  template <int kBytes>
  __device__ __forceinline__ void add_parts(const MlaMerge& merge, int row, uint32_t source,
                                            uint32_t weights, int slice, float factor) const {
    constexpr int kPairs = kBytes >= 512 ? 4 : 1;  // of columns, that a lane has side by side
    constexpr int kUnits = kBytes / (kPairs * 4), kPasses = ceil_div(kUnits, 32);
    if (lane_idx_ >= kUnits) return;
    O* const target =
        MlaRowPlace(params_, merge.qo_begin, merge.row_begin + row).template row<O>(params_);
    source += lane_idx_ * kPairs * 4;
    float sums[kPasses][2 * kPairs] = {};
    int left = merge.num_parts;
#pragma unroll kPasses == 1 ? 4 : 1
    for (; left >= 4; left -= 4) {
      const uint4 four = ptx::load_shared_16(weights);
      const uint32_t of_parts[4] = {four.x, four.y, four.z, four.w};
      uint32_t pairs[4][kPasses][kPairs];
#pragma unroll
      for (int k = 0; k < 4 * kPasses; ++k) {
        load_pairs(source + k / kPasses * kBytes + k % kPasses * 512,
                   pairs[k / kPasses][k % kPasses]);
      }
#pragma unroll
      for (int k = 0; k < 4 * kPasses; ++k) {
        add_part(of_parts[k / kPasses], pairs[k / kPasses][k % kPasses], sums[k % kPasses]);
      }
      weights += 16;
      source += 4 * kBytes;
    }
#pragma unroll 1
    for (; left > 0; --left) {
      const uint32_t weight = ptx::load_shared_4(weights);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        uint32_t pairs[kPairs];
        load_pairs(source + i * 512, pairs);
        add_part(weight, pairs, sums[i]);
      }
      weights += 4;
      source += kBytes;
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      uint32_t words[kPairs];
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        words[k] = PackedPair<O>::pack(sums[i][2 * k] * factor, sums[i][2 * k + 1] * factor);
      }
      if constexpr (kPairs == 1) {
        const int word = slice * (kBytes / 4) + lane_idx_;
        reinterpret_cast<uint32_t*>(target)[mla_part_pair(word)] = words[0];
      } else {
        transpose_in_quad(words, lane_idx_);
        reinterpret_cast<uint4*>(target)[i * 32 + lane_idx_] =
            uint4{words[0], words[1], words[2], words[3]};
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
