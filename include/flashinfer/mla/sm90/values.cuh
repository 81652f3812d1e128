// Products of weights with values, which are the latent columns of KV as they lie in shared memory.
#pragma once

#include <cstdint>
#include <flashinfer/ptx/wgmma.cuh>

namespace flashinfer {

// The values of a half of the columns of the block at `block`.
template <typename Tile>
__device__ __forceinline__ uint64_t mla_value_operand(uint32_t block, int half) {
  return ptx::wgmma_operand(block + Tile::chunk_offset(half * Tile::kChunksHalf),
                            Tile::kColumnBytes, Tile::kGroupBytes);
}

// Adds the products of 16 tokens, the `step`-th ones of `values`. `weights`: registers or an
// operand. The compiler refuses products wider than the registers that it counts for a thread
// before those who multiply get more.
template <typename Tile, typename Weights>
__device__ __forceinline__ void add_mla_values(float (&output)[Tile::kOutputTiles][4],
                                               const Weights& weights, uint64_t values, int step) {
  constexpr int kTiles = Tile::kThreadRegisters > 128 ? Tile::kOutputTiles : 16;
  using Piece = float[kTiles][4];
#pragma unroll
  for (int i = 0; i < Tile::kOutputTiles / kTiles; ++i) {
    ptx::wgmma<typename Tile::T, true>(
        reinterpret_cast<Piece&>(output[i * kTiles]), weights,
        ptx::wgmma_advance(values, step * 2 * Tile::kGroupBytes + i * 2 * Tile::kColumnBytes),
        true);
  }
}

}  // namespace flashinfer
