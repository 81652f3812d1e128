// Merges the parts of tiles whose KV range was cut, at the end of the kernel that makes them.
//
// CTAs count the parts that are there. A CTA that has nothing else to do waits for the other parts
// of its last tile, and those that wait share the tile's rows. It waits only if all CTAs that bring
// a part have started, so that none needs the room of one that waits; otherwise the CTA that brings
// the last part merges all rows. Parts are added up in the same order whoever does it: results
// repeat bit for bit.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/mla/row_end.cuh>
#include <flashinfer/mla/sm90/tile.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/progress.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

// Called by the 256 threads that multiply.
template <typename Tile>
class MlaPartMerge {
  using O = typename Tile::O;
  static constexpr int kWarps = Tile::kConsumerThreads / 32;
  static constexpr int kFewParts = 16;                // that are added up one after the other
  static constexpr int kLoads = Tile::kDimCkv / 256;  // of 8 columns a lane
  // The counter of parts has three numbers: parts that are there, CTAs that wait, and of them those
  // that have seen all parts.
  static constexpr uint32_t kPart = 1, kWaiting = 1 << 10, kSeen = 1 << 20, kMask = 1023;
  static constexpr int kCounter = 128;  // the thread that counts starts
  using Sums = float[kLoads][8];

 public:
  __device__ __forceinline__ MlaPartMerge(const MlaParams& params, MlaControl& control,
                                          uint32_t shared)
      : params_(params), control_(control), shared_(shared) {}

  // The CTA counts its first and its last item; the others are whole tiles. A thread of the second
  // warpgroup does it, which waits for the first's logits anyway.
  __device__ __forceinline__ void count_start(int begin, int end) const {
    if (threadIdx.x == 0) control_.complete_merge = -1;
    if (params_.counters == nullptr || threadIdx.x != kCounter || begin == end) return;
    count_start(params_.items[begin]);
    if (end - begin > 1) count_start(params_.items[end - 1]);
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
    MlaMerge merge = {};
    if (number >= 0) merge = params_.merges[number];
    synchronize();
    if (threadIdx.x == 0) {
      control_.share_count = 0;
      if (number >= 0) take_part(number, merge.num_parts, true);
    }
    synchronize();
    if (control_.share_count == 0 && control_.complete_merge < 0) return;
    const Rows rows = share_of(merge);
    const bool together = has_groups(merge) && rows.count <= kWarps;
    add_rows(merge, rows, together);
    synchronize();
    if (together) finish_groups(merge, rows);
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
    const bool waits = is_last && ptx::see_events(&counters->started) == num_parts;
    const uint32_t before = ptx::count_and_see(counter, kPart + (waits ? kWaiting : 0));
    const uint32_t waiting = before / kWaiting & kMask;
    const bool is_complete = (before & kMask) + 1 == num_parts;
    control_.share_index = waits ? waiting : 0;
    control_.share_count = 0;
    if (waits) {
      uint32_t now = before + kPart + kWaiting;
      while ((now & kMask) != num_parts) now = ptx::see_count(counter);
      control_.share_count = now / kWaiting & kMask;
      const uint32_t seen = ptx::count_and_see(counter, kSeen) / kSeen & kMask;
      if (seen + 1 == control_.share_count) *counters = {0, 0};  // for the next launch
    } else if (is_complete && waiting == 0) {
      control_.share_count = 1;
      *counters = {0, 0};
    }
  }

  // ---- Rows ----

  // Rows first, first + step, ... of a tile.
  struct Rows {
    int first, step, count;
  };

  __device__ __forceinline__ int num_rows(const MlaMerge& merge) const {
    return min(Tile::kRows,
               merge.qo_len * static_cast<int>(params_.num_heads.divisor) - merge.row_begin);
  }

  __device__ __forceinline__ Rows share_of(const MlaMerge& merge) const {
    const int step = control_.share_count, first = control_.share_index;
    if (step == 0) return {0, 0, 0};
    return {first, step, max(0, (num_rows(merge) - first + step - 1) / step)};
  }

  // Parts of a tile that has many are added up in groups, one for each warp, and then the groups,
  // whether all warps do it or one.
  __device__ __forceinline__ static bool has_groups(const MlaMerge& merge) {
    return merge.num_parts > kFewParts;
  }

  __device__ __forceinline__ static int64_t place(const MlaMerge& merge, int part, int row) {
    return (int64_t{merge.slot_begin} + int64_t{part} * merge.slot_stride) * Tile::kRows + row;
  }

  __device__ __forceinline__ float find_largest(const MlaMerge& merge, int row) const {
    float largest = -math::inf;
    for (int part = threadIdx.x % 32; part < merge.num_parts; part += 32) {
      largest = fmaxf(largest, __ldcg(params_.partial_lse + place(merge, part, row)));
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    return largest;
  }

  // Adds up the parts first, first + step, ...; the lane has columns 8 lane ... of each 256.
  __device__ __forceinline__ float add_parts(const MlaMerge& merge, int row, int first, int step,
                                             float largest, Sums& sums) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sums[i][e] = 0.f;
    }
    const float reference = largest == -math::inf ? 0.f : largest;
#pragma unroll 4
    for (int part = first; part < merge.num_parts; part += step) {
      const int64_t slot_row = place(merge, part, row);
      const float weight = math::ptx_exp2(__ldcg(params_.partial_lse + slot_row) - reference);
      const uint4* source = reinterpret_cast<const uint4*>(
          static_cast<const O*>(params_.partial_o) + slot_row * Tile::kDimCkv);
      sum += weight;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4 bits = __ldcg(source + i * 32 + threadIdx.x % 32);
        const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float value = to_float(O{static_cast<uint16_t>(pairs[e / 2] >> e % 2 * 16)});
          sums[i][e] = fmaf(value, weight, sums[i][e]);
        }
      }
    }
    return sum;
  }

  __device__ __forceinline__ static void add(Sums& sums, const Sums& others) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sums[i][e] += others[i][e];
    }
  }

  // Adds up the parts of the CTA's share, then those of the tile that it completed. A warp has rows
  // of its own, or `together` with the others a group of each row. All of it is one copy of the
  // code, which would otherwise be a sixth of what the kernel takes to compile.
  __device__ __forceinline__ void add_rows(MlaMerge merge, Rows rows, bool together) const {
    const int warp = threadIdx.x / 32;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == 1) {
        if (control_.complete_merge < 0) break;
        merge = params_.merges[control_.complete_merge];
        rows = {0, 1, num_rows(merge)};
        together = false;
      }
      const int groups = has_groups(merge) ? kWarps : 1;
#pragma unroll 1
      for (int i = together ? 0 : warp; i < rows.count; i += together ? 1 : kWarps) {
        const int row = rows.first + i * rows.step;
        const float largest = find_largest(merge, row);
        Sums sums = {}, others;
        float sum = 0.f;
#pragma unroll 1
        for (int group = together ? warp : 0; group < (together ? warp + 1 : groups); ++group) {
          sum += add_parts(merge, row, group, groups, largest, others);
          add(sums, others);
        }
        if (together) {
          store_group(i, sum, sums);
        } else {
          write(merge, row, largest, sum, sums);
        }
      }
    }
  }

  __device__ __forceinline__ void write(const MlaMerge& merge, int row, float largest, float sum,
                                        const Sums& sums) const {
    const MlaRowEnd end(params_, merge.qo_begin, merge.row_begin + row, largest, sum);
    if (threadIdx.x % 32 == 0) end.write_lse(params_);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        pairs[p] =
            PackedPair<O>::pack(sums[i][2 * p] * end.factor, sums[i][2 * p + 1] * end.factor);
      }
      reinterpret_cast<uint4*>(end.template row<O>(params_))[i * 32 + threadIdx.x % 32] =
          uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

  // ---- Rows of many parts, by all warps ----
  //
  // Sums of groups go through the place of queries and keys, which nobody needs after the CTA's
  // last item.

  // Where the lane's columns of a group of the share's row `i` lie, and the group's sum of weights.
  __device__ __forceinline__ uint32_t group_place(int i, int group) const {
    return shared_ + (i * kWarps + group) * Tile::kDimCkv * 4 + threadIdx.x % 32 * 32;
  }

  // Stores the warp's group of row `i`.
  __device__ __forceinline__ void store_group(int i, float sum, const Sums& sums) const {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) control_.part_sums[i][warp] = sum;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const float* x = &sums[k][e];
        ptx::store_shared_16(group_place(i, warp) + k * 1024 + e * 4,
                             uint4{__float_as_uint(x[0]), __float_as_uint(x[1]),
                                   __float_as_uint(x[2]), __float_as_uint(x[3])});
      }
    }
  }

  // Each warp adds up the groups of one row.
  __device__ __forceinline__ void finish_groups(const MlaMerge& merge, const Rows& rows) const {
    const int i = threadIdx.x / 32;
    if (i >= rows.count) return;
    const int row = rows.first + i * rows.step;
    Sums sums = {}, others;
    float sum = 0.f;
#pragma unroll 1
    for (int group = 0; group < kWarps; ++group) {
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
#pragma unroll
        for (int e = 0; e < 8; e += 4) {
          const uint4 x = ptx::load_shared_16(group_place(i, group) + k * 1024 + e * 4);
          others[k][e] = __uint_as_float(x.x);
          others[k][e + 1] = __uint_as_float(x.y);
          others[k][e + 2] = __uint_as_float(x.z);
          others[k][e + 3] = __uint_as_float(x.w);
        }
      }
      sum += control_.part_sums[i][group];
      add(sums, others);
    }
    write(merge, row, find_largest(merge, row), sum, sums);
  }

  const MlaParams& params_;
  MlaControl& control_;
  const uint32_t shared_;
};

}  // namespace flashinfer
