// Shared memory of the MLA kernel for few rows of 8 bits (mla/sm90/ring_kernel.cuh): a ring of
// blocks of KV as they lie in memory, queries, weights, and what the warps tell each other.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/mla/sm90/pair_merge.cuh>

namespace flashinfer {

// Significant bits of a value.
template <typename T>
inline constexpr int kMlaBits = sizeof(T) == 1                       ? 4
                                : std::is_same_v<T, dtype::bfloat16> ? 8
                                                                     : 11;

// With `kInPairs_`, CTAs are clusters of two that have the parts of a tile (pair_merge.cuh).
template <typename O_, int kDimCkv_, int kDimKpe_, typename Q_, typename Ckv_, typename Kpe_,
          bool kInPairs_ = false>
struct MlaNarrowTile {
  using T =
      dtype::float16;  // of weights, and of values beside them: it represents every e4m3 value
  using O = O_;
  static constexpr bool kInPairs = kInPairs_;
  using Q = Q_;
  using Ckv = Ckv_;
  using Kpe = Kpe_;
  static_assert(sizeof(Ckv) == 1);
  static constexpr int kDimCkv = kDimCkv_, kDimKpe = kDimKpe_;
  static_assert((kDimCkv == 512 || kDimCkv == 256) && (kDimKpe == 64 || kDimKpe == 0));
  static constexpr int kRows = 16;   // packed query rows at a time
  static constexpr int kBlock = 64;  // KV tokens of a block
  // Two groups of warps take turns at blocks; a warp has a quarter of the output's columns.
  static constexpr int kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;
  static constexpr int kMathThreads = 2 * kGroupThreads, kThreads = kMathThreads + 128;
  static constexpr int kLoadRegisters = 56, kMathRegisters = 224;
  // A launch has 168 for each thread. Asking for more waits for ever.
  static_assert(kLoadRegisters + 2 * kMathRegisters == 3 * 168);
  static constexpr int kWarpColumns = kDimCkv / kGroupWarps;
  static constexpr int kUnits = kWarpColumns / 16;  // of 16 columns

  // A query is the sum of so many values of the keys' type, each a row of products of its own.
  static constexpr int kTerms = (kMlaBits<Q> + kMlaBits<Ckv> - 1) / kMlaBits<Ckv>;
  static constexpr int kRopeTerms = (kMlaBits<Q> + kMlaBits<Kpe> - 1) / kMlaBits<Kpe>;

  // Chunks of 128 bytes of columns, the last one kpe, as the copy engine writes them.
  static constexpr int kChunkColumns = 128, kChunksCkv = kDimCkv / kChunkColumns;
  static constexpr int kChunks = kChunksCkv + kDimKpe / 64, kChunkBytes = kBlock * 128;
  static constexpr int kRopeRowBytes = 64 * static_cast<int>(sizeof(Kpe));
  static constexpr int kRopeBytes = kDimKpe / 64 * kBlock * kRopeRowBytes;
  static constexpr int kStageBytes = kChunksCkv * kChunkBytes + kRopeBytes;

  // Queries, as keys, then weights of both groups, of even and of odd blocks. At the end of an item
  // outputs of the groups take their place.
  static constexpr int kQueryChunkBytes = kTerms * kRows * 128;
  static constexpr int kRopeQueryBytes = kDimKpe / 64 * kRopeTerms * kRows * kRopeRowBytes;
  static constexpr int kQueryBytes = kChunksCkv * kQueryChunkBytes + kRopeQueryBytes;
  static constexpr int kWeightPitch = kBlock * 2 + 16, kWeightBytes = kRows * kWeightPitch;
  static constexpr int kUsedBytes = kQueryBytes + 4 * kWeightBytes;
  static constexpr int kExchangeBytes = kGroupWarps * kUnits * 512;  // of a group
  static constexpr int kSharedQueryBytes =
      ((kUsedBytes > 2 * kExchangeBytes ? kUsedBytes : 2 * kExchangeBytes) + 1023) / 1024 * 1024;
  using PairMerge = MlaPairMerge<O, kUnits * 4, kGroupWarps>;
  static constexpr int kPairBytes = kInPairs ? PairMerge::kBytes : 0;
  static constexpr int kOwnPlanBytes = kSharedQueryBytes;  // where an own plan's sums may lie
  static constexpr int kControlBytes = 2048, kMaxBytes = 227 << 10;
  static constexpr int kRoom =
      (kMaxBytes - kControlBytes - kSharedQueryBytes - kPairBytes) / kStageBytes;
  static constexpr int kStages = kRoom < 8 ? kRoom : 8;

  static constexpr int kOffsetQueries = kStages * kStageBytes;
  static constexpr int kOffsetRopeQueries = kOffsetQueries + kChunksCkv * kQueryChunkBytes;
  static constexpr int kOffsetWeights = kOffsetQueries + kQueryBytes;
  static constexpr int kOffsetExchange = kOffsetQueries;
  static constexpr int kOffsetControl = kOffsetQueries + kSharedQueryBytes;
  static constexpr int kOffsetReceived = kOffsetControl + kControlBytes;
  static constexpr int kSharedBytes = kOffsetReceived + kPairBytes;
  static_assert(kSharedBytes <= kMaxBytes);
};

template <typename Tile>
struct MlaNarrowControl {
  float scales[Tile::kRows], rope_scales[Tile::kRows];  // of logits
  float told[2][Tile::kGroupWarps][Tile::kRows];        // largest logits of a group's warps
  float largest[2][Tile::kRows];                        // references of the groups
  float sums[2][Tile::kGroupWarps][Tile::kRows];        // of the warps' weights
  uint64_t full[Tile::kStages], empty[Tile::kStages];
  uint32_t is_last;     // whether the CTA has brought the last part of a tile
  uint64_t parts_full;  // the other CTA of a pair has sent its columns
};

}  // namespace flashinfer
