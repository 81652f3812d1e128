// Sums of tiles whose CTAs, a cluster, sum a part of k each. Each CTA pushes its sums, 16 rows of
// the weights at a time, to the CTA that adds these rows up, in the order of CTAs. Nobody waits for
// others but the warps that add up.
#pragma once

#include <flashinfer/gemm/sm90/weight_tile.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/mbarrier_cluster.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

// Adds four sums in shared memory to `sum`.
__device__ __forceinline__ void add_shared(uint32_t shared, float (&sum)[4]) {
  const uint4 bits = ptx::load_shared_16(shared);
  sum[0] += __uint_as_float(bits.x);
  sum[1] += __uint_as_float(bits.y);
  sum[2] += __uint_as_float(bits.z);
  sum[3] += __uint_as_float(bits.w);
}

template <typename Tile>
class WeightSplit {
  static constexpr uint32_t kSplits = Tile::kSplits;

 public:
  __device__ __forceinline__ explicit WeightSplit(uint32_t shared)
      : sums_(shared + Tile::kOffsetSums), full_(shared + Tile::kOffsetSplitBarrier) {}

  // Blocks of 16 rows that this CTA adds up: every kSplits-th.
  __device__ __forceinline__ static uint32_t blocks() {
    return (Tile::kBlocks - ptx::cluster_rank() + kSplits - 1) / kSplits;
  }

  // Bytes that all CTAs, this one too, push to this one.
  __device__ __forceinline__ static uint32_t bytes() {
    return blocks() * kSplits * Tile::kBlockBytes;
  }

  // The first row of block `i` of this CTA, within the tile.
  __device__ __forceinline__ static uint32_t first_row(uint32_t i) {
    return (ptx::cluster_rank() + i * kSplits) * 16;
  }

  // Pushes sums of a block and eight tokens to the CTA that adds them up.
  __device__ __forceinline__ void push(uint32_t block, uint32_t tile, const float (&sum)[4]) const {
    ptx::store_remote(address(block / kSplits, ptx::cluster_rank(), tile), full_, block % kSplits,
                      sum);
  }

  // Adds a lane's four sums of block `i` of this CTA, once all CTAs' have come.
  __device__ __forceinline__ void add_up(uint32_t i, uint32_t tile, float (&sum)[4]) const {
    ptx::mbarrier_wait_soon(full_, 0);
#pragma unroll
    for (uint32_t rank = 0; rank < kSplits; ++rank) add_shared(address(i, rank, tile), sum);
  }

 private:
  __device__ __forceinline__ uint32_t address(uint32_t i, uint32_t rank, uint32_t tile) const {
    return sums_ + (i * kSplits + rank) * Tile::kBlockBytes + tile * 512 + threadIdx.x % 32 * 16;
  }

  uint32_t sums_, full_;
};

}  // namespace flashinfer
