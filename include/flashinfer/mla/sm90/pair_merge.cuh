// Merges the two parts of a tile of few rows within a cluster of the two CTAs that have them, where
// a plan cuts every tile in two and each CTA has one item: a trip from one multiprocessor to its
// neighbour, in place of three to L2.
//
// Both CTAs have all columns of their part. Each keeps those of one group of warps, and sends the
// other group's to the same warp of the other CTA.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/exp2.cuh>
#include <flashinfer/ptx/cluster.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/mbarrier_cluster.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

// A thread has `kValues` values, in fours: two of row lane / 4, two of that row + 8. Parts are
// rounded to O.
template <typename O, int kValues, int kGroupWarps>
class MlaPairMerge {
  static constexpr int kUnits = kValues / 8, kUnitBytes = 32 * 16;  // of 16 bytes a lane
  static constexpr int kLseBytes = 16 * 4, kWarpBytes = kUnits * kUnitBytes + kLseBytes;
  static_assert(sizeof(O) == 2 && kValues % 8 == 0);

 public:
  // Of shared memory, where the other CTA's columns come.
  static constexpr int kBytes = kGroupWarps * kWarpBytes;

  // Called by one thread before the cluster's barrier.
  __device__ __forceinline__ static void init(const uint64_t& full) {
    ptx::mbarrier_init(ptx::shared_address(&full), 1);
    ptx::mbarrier_arrive_expect(ptx::shared_address(&full), kBytes);
  }

  // `received`: the place of kBytes. `value(i)`: sums of weighted values of the thread; `sums` are
  // those of weights, relative to `largest`. Returns whether the warp keeps its columns; then all
  // three are those of both parts.
  template <typename Value>
  __device__ __forceinline__ static bool exchange(const Value& value, float (&largest)[2],
                                                  float (&sums)[2], const uint64_t& full,
                                                  uint32_t received, int group) {
    const int lane_idx = threadIdx.x % 32;
    const uint32_t warp = received + threadIdx.x / 32 % kGroupWarps * kWarpBytes;
    const uint32_t barrier = ptx::shared_address(&full), rank = ptx::cluster_rank();
    if (static_cast<uint32_t>(group) != rank) {
      send(value, largest, sums, barrier, warp, rank ^ 1, lane_idx);
      return false;
    }
    ptx::mbarrier_wait(barrier, 0);
    add(value, largest, sums, warp, lane_idx);
    return true;
  }

 private:
  template <typename Value>
  __device__ __forceinline__ static void send(const Value& value, const float (&largest)[2],
                                              const float (&sums)[2], uint32_t barrier,
                                              uint32_t warp, uint32_t rank, int lane_idx) {
    float factor[2], lse[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = sums[h] == 0.f ? 0.f : 1.f / sums[h];  // NaN stays NaN
      lse[h] = sums[h] == 0.f ? -math::inf : largest[h] + math::ptx_log2(sums[h]);
      lse[2 + h] = __shfl_xor_sync(0xffffffffu, lse[h], 4);  // of the next row
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      float words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int i = unit * 8 + k * 2, h = k % 2;
        words[k] =
            __uint_as_float(PackedPair<O>::pack(value(i) * factor[h], value(i + 1) * factor[h]));
      }
      ptx::store_remote(warp + unit * kUnitBytes + lane_idx * 16, barrier, rank, words);
    }
    if (lane_idx % 8 == 0) {
      ptx::store_remote(warp + kUnits * kUnitBytes + lane_idx * 2, barrier, rank, lse);
    }
  }

  template <typename Value>
  __device__ __forceinline__ static void add(const Value& value, float (&largest)[2],
                                             float (&sums)[2], uint32_t warp, int lane_idx) {
    float own[2], other[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t at = warp + kUnits * kUnitBytes + lane_idx / 4 * 8 + h * 4;
      const float lse = __uint_as_float(ptx::load_shared_4(at));
      const float both = fmaxf(largest[h], lse), reference = both == -math::inf ? 0.f : both;
      own[h] = math::ptx_exp2(largest[h] - reference);
      other[h] = math::ptx_exp2(lse - reference);
      sums[h] = fmaf(sums[h], own[h], other[h]);
      largest[h] = both;
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const uint4 four = ptx::load_shared_16(warp + unit * kUnitBytes + lane_idx * 16);
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int h = e / 2 % 2;
        const float theirs = to_float(O{static_cast<uint16_t>(words[e / 2] >> e % 2 * 16)});
        float& sum = value(unit * 8 + e);
        sum = fmaf(theirs, other[h], sum * own[h]);
      }
    }
  }
};

}  // namespace flashinfer
