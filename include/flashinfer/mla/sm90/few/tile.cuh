// Shared memory of the MLA kernel for few rows of 16 bits (mla/sm90/ring_kernel.cuh): a ring of
// blocks of KV, and what the warps tell each other.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/mla/sm90/pair_merge.cuh>

namespace flashinfer {

// With `kInPairs_`, CTAs are clusters of two that have the parts of a tile (pair_merge.cuh).
template <typename T_, typename O_, int kDimCkv_, int kDimKpe_, bool kInPairs_ = false>
struct MlaFewTile {
  using T = T_;  // of queries and caches
  using O = O_;
  static constexpr bool kInPairs = kInPairs_;
  using Ckv = T_;
  using Kpe = T_;
  static_assert(sizeof(T) == 2);
  static constexpr int kDimCkv = kDimCkv_, kDimKpe = kDimKpe_;
  static_assert((kDimCkv == 512 || kDimCkv == 256) && (kDimKpe == 64 || kDimKpe == 0));
  static constexpr int kRows = 16;   // packed query rows at a time
  static constexpr int kBlock = 32;  // KV tokens of a block
  // Two groups of warps take turns at blocks; a warp has a quarter of the columns.
  static constexpr int kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;
  static constexpr int kMathThreads = 2 * kGroupThreads, kThreads = kMathThreads + 128;
  static constexpr int kLoadRegisters = 56, kMathRegisters = 224;
  // A launch has 168 for each thread. Asking for more waits for ever.
  static_assert(kLoadRegisters + 2 * kMathRegisters == 3 * 168);
  static constexpr int kWarpColumns = kDimCkv / kGroupWarps;
  static constexpr int kCkvSteps = kWarpColumns / 16;  // of a warp's products
  static constexpr int kKeySteps = kCkvSteps + kDimKpe / 16 / kGroupWarps;
  static constexpr int kTokenTiles = kBlock / 8, kOutputTiles = kWarpColumns / 8;

  // Chunks of 64 columns, the last one kpe, as the copy engine writes them with its swizzle.
  static constexpr int kChunkColumns = 64, kRopeRowBytes = 128;
  static constexpr int kChunksCkv = kDimCkv / 64, kChunks = kChunksCkv + kDimKpe / 64;
  static constexpr int kChunkBytes = kBlock * 128, kStageBytes = kChunks * kChunkBytes;
  // Logits of a warp's columns, of even and of odd blocks; at the end of an item, outputs.
  static constexpr int kPartBytes = kTokenTiles * 32 * 16;
  static constexpr int kExchangeBytes = 2 * kGroupWarps * kPartBytes;  // of a group
  using PairMerge = MlaPairMerge<O, kOutputTiles * 2, kGroupWarps>;
  static constexpr int kPairBytes = kInPairs ? PairMerge::kBytes : 0;
  static constexpr int kOwnPlanBytes = 2 * kExchangeBytes;  // where an own plan's sums may lie
  static constexpr int kControlBytes = 512, kMaxBytes = 227 << 10;
  static constexpr int kRoom =
      (kMaxBytes - kControlBytes - 2 * kExchangeBytes - kPairBytes) / kStageBytes;
  static constexpr int kStages = kRoom < 8 ? kRoom : 8;
  static constexpr int kOffsetExchange = kStages * kStageBytes;
  static constexpr int kOffsetControl = kOffsetExchange + 2 * kExchangeBytes;
  static constexpr int kOffsetReceived = kOffsetControl + kControlBytes;
  static constexpr int kSharedBytes = kOffsetReceived + kPairBytes;
  static_assert(kSharedBytes <= kMaxBytes);
};

template <typename Tile>
struct MlaFewControl {
  float largest[2][Tile::kRows], sums[2][Tile::kRows];  // of the groups
  uint64_t full[Tile::kStages], empty[Tile::kStages];
  uint32_t is_last;     // whether the CTA has brought the last part of a tile
  uint64_t parts_full;  // the other CTA of a pair has sent its columns
};

}  // namespace flashinfer
