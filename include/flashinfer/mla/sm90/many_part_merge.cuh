// Merges rows of a tile of many parts (part_merge.cuh): a row or some rows at a time.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/output.cuh>
#include <flashinfer/mla/row_end.cuh>
#include <flashinfer/mla/sm90/merge_share.cuh>
#include <flashinfer/mla/sm90/part_rows.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

// Called by the 256 threads that multiply.
template <typename Tile>
class MlaManyPartMerge {
  using O = typename Tile::O;
  static constexpr int kThreads = Tile::kConsumerThreads, kWarps = kThreads / 32;
  static constexpr int kRowBytes = Tile::kDimCkv * 2;
  static_assert(sizeof(O) == 2);

 public:
  // `shared`: the place of queries and keys.
  __device__ __forceinline__ MlaManyPartMerge(const MlaParams& params, const MlaMergeShare& share,
                                              uint32_t shared)
      : params_(params),
        share_(share),
        shared_(shared),
        warp_idx_(threadIdx.x / 32),
        lane_idx_(threadIdx.x % 32) {}

  template <typename Synchronize>
  __device__ __forceinline__ void run(const Synchronize& synchronize) const {
    const int step = share_.step;
    const Rows rows = {share_.first, step,
                       max(0, (share_.num_rows - share_.first + step - 1) / step)};
    const int most = kPlaces / share_.merge.num_parts;
#pragma unroll 1
    for (int i = 0; i < rows.count; i += most) {
      const Rows some = {rows.first + i * step, step, min(most, rows.count - i)};
      copy(share_.merge, some);
      synchronize();
      weigh(share_.merge, some);
      ptx::cp_async_wait<0>();
      synchronize();
      if (rows.count < 4) {
        add<1>(share_.merge, some);
      } else {
        add<4>(share_.merge, some);
      }
      synchronize();  // the places are free
    }
  }

 private:
  // Rows first, first + step, ... of a tile.
  struct Rows {
    int first, step, count;
  };

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

  // Asks for the rows of all parts; leaves the parts' LSEs where weights will be.
  __device__ __forceinline__ void copy(const MlaMerge& merge, const Rows& rows) const {
    const int num_places = rows.count * merge.num_parts, place = lane_idx_ * kWarps + warp_idx_;
    const int row = static_cast<unsigned>(place) / static_cast<unsigned>(merge.num_parts);
    const int part = place - row * merge.num_parts;
    const int slot_row = mla_slot_row(merge, part, rows.first + row * rows.step);
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
      largest = warp_reduce_max(largest);
      const float reference = largest == -math::inf ? 0.f : largest;
      float sum = 0.f;
#pragma unroll 1
      for (int part = lane_idx_; part < merge.num_parts; part += 32) {
        const float weight = math::ptx_exp2(load(part) - reference);
        store(part, weight);
        sum += weight;
      }
      sum = warp_reduce_sum(sum);
      const int row = rows.first + i * rows.step;
      const MlaRowEnd end(params_, merge.qo_begin, merge.row_begin + row, largest, sum);
      if (lane_idx_ == 0) end.write_lse(params_);
#pragma unroll 1
      for (int part = lane_idx_; part < merge.num_parts; part += 32) {
        store(part, load(part) * end.factor);
      }
    }
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
  const MlaMergeShare& share_;
  const uint32_t shared_;
  const int warp_idx_, lane_idx_;
};

}  // namespace flashinfer
