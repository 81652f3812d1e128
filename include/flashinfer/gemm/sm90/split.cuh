// Split products: CTAs of a cluster sum a part of k each, for one tile of D. Each pushes its sums
// to the shared memory of the CTA that owns those right rows, which adds them up in the order of k.
#pragma once

#include <flashinfer/gemm/sm90/tile.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/mbarrier_cluster.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

template <typename Tile>
class GemmSplit {
  static constexpr int kReps = Tile::kReps, kTiles = Tile::kTiles;
  static constexpr int kOwned = Tile::kOwnedTiles;  // the first tiles are the first CTA's
  static constexpr int kOwners = kTiles / kOwned;
  static constexpr uint32_t kSourceBytes = kReps * kOwned * Tile::kConsumerThreads * 16;

 public:
  __device__ __forceinline__ explicit GemmSplit(uint32_t shared) {
    sums_ = shared + Tile::kOffsetPartial;
    full_ = shared + Tile::kOffsetControl + 2 * Tile::kStages * 8;
    empty_ = full_ + 8;
  }

  // Completes the sums that this CTA owns, and leaves the others as they are.
  template <typename Sums>
  __device__ __forceinline__ void add_up(Sums& sums, bool is_last) {
    const bool owns = place_.split < kOwners;
    if (owns && threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect(full_, (Tile::kSplits - 1) * kSourceBytes);
    }
    if (!is_first_) ptx::mbarrier_wait_cluster(empty_, phase_ ^ 1);
#pragma unroll
    for (int rep = 0; rep < kReps; ++rep) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint32_t owner = j / kOwned;
        if (place_.is_split(owner)) continue;
        ptx::store_remote(address(place_.split, rep, j), full_,
                          GemmPlace<Tile>::rank(place_.row, place_.column, owner), sums[rep][j]);
      }
    }
    if (owns) {
      ptx::mbarrier_wait_soon(full_, phase_);
#pragma unroll
      for (int rep = 0; rep < kReps; ++rep) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (place_.is_split(j / kOwned)) add(sums[rep][j], rep, j);
        }
      }
    }
    if (!is_last) tell_read();
    is_first_ = false;
    phase_ ^= 1;
  }

 private:
  // Address of this thread's four sums of a tile that `split` pushed to its owner.
  __device__ __forceinline__ uint32_t address(uint32_t split, int rep, int j) const {
    return sums_ + split * kSourceBytes +
           ((rep * kOwned + j % kOwned) * Tile::kConsumerThreads + threadIdx.x) * 16;
  }

  __device__ __forceinline__ void add(float (&sum)[4], int rep, int j) const {
    float total[4] = {};
#pragma unroll
    for (uint32_t split = 0; split < Tile::kSplits; ++split) {
      const uint4 bits = ptx::load_shared_16(address(split, rep, j));
      const bool own = split == place_.split;
      total[0] += own ? sum[0] : __uint_as_float(bits.x);
      total[1] += own ? sum[1] : __uint_as_float(bits.y);
      total[2] += own ? sum[2] : __uint_as_float(bits.z);
      total[3] += own ? sum[3] : __uint_as_float(bits.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = total[i];
  }

  // Every warp of every CTA calls this before any of them pushes again.
  __device__ __forceinline__ void tell_read() const {
    __syncwarp();
    const uint32_t lane_idx = threadIdx.x % 32;
    if (lane_idx < Tile::kSplits) {
      ptx::mbarrier_arrive_remote(empty_,
                                  GemmPlace<Tile>::rank(place_.row, place_.column, lane_idx));
    }
  }

  const GemmPlace<Tile> place_;
  uint32_t sums_, full_, empty_, phase_ = 0;
  bool is_first_ = true;
};

}  // namespace flashinfer
