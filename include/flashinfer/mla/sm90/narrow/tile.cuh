// Shared memory of the MLA kernel for few rows (mla/sm90/narrow/mla.cuh): a ring of blocks of KV as
// they lie in memory, weights, and what the warps tell each other.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>

namespace flashinfer {

template <typename O_, int kDimCkv_, int kDimKpe_, typename Q_, typename Ckv_, typename Kpe_>
struct MlaNarrowTile {
  using T = dtype::float16;  // what is multiplied: it represents every e4m3 value
  using O = O_;
  using Q = Q_;
  using Ckv = Ckv_;
  using Kpe = Kpe_;
  static_assert(sizeof(Ckv) == 1);
  static constexpr int kDimCkv = kDimCkv_, kDimKpe = kDimKpe_;
  static_assert((kDimCkv == 512 || kDimCkv == 256) && (kDimKpe == 64 || kDimKpe == 0));
  static constexpr int kRows = 16;                       // packed query rows at a time
  static constexpr int kBlock = 64;                      // KV tokens of a block
  static constexpr int kWarps = 8;                       // that multiply
  static constexpr int kTokens = kBlock / kWarps;        // of a block, whose logits a warp has
  static constexpr int kGroups = kDimCkv / kWarps / 16;  // of 16 output columns of a warp
  static constexpr int kChunks = kDimCkv / 64;           // of 64 columns of a latent row
  static constexpr int kRopeSteps = kDimKpe / 16;        // of a product
  static constexpr int kCopyThreads = 128, kMathThreads = 256, kThreads = 384;
  static constexpr int kCopyRegisters = 40, kMathRegisters = 232;
  // A launch has 168 for each thread. Asking for more waits for ever.
  static_assert(kCopyRegisters + 2 * kMathRegisters == 3 * 168);

  // Rows of KV: ckv, kpe and a gap, which makes the pitch an odd number of 16 bytes. So rows begin
  // in different banks.
  static constexpr int kRopeBytes = kDimKpe * static_cast<int>(sizeof(Kpe));
  static constexpr int kPitch = kDimCkv + kRopeBytes + 16;
  static_assert(kPitch / 16 % 2 == 1);
  static constexpr int kStageBytes = kBlock * kPitch;
  static constexpr int kWeightPitch = kBlock * 2 + 16;
  static constexpr int kWeightBytes = kRows * kWeightPitch;
  static constexpr int kControlBytes = 3072, kMaxBytes = 227 << 10;
  static constexpr int kStages = (kMaxBytes - kControlBytes - 2 * kWeightBytes) / kStageBytes;

  static constexpr int kOffsetWeights = kStages * kStageBytes;  // of even blocks, of odd blocks
  static constexpr int kOffsetControl = kOffsetWeights + 2 * kWeightBytes;
  static constexpr int kSharedBytes = kOffsetControl + kControlBytes;
};

template <typename Tile>
struct MlaNarrowControl {
  alignas(16) float largest[2][Tile::kRows][Tile::kWarps];  // logits of even and of odd blocks
  alignas(16) float sums[2][Tile::kRows][Tile::kWarps];     // by parity of the pass
  uint32_t is_last;  // whether the CTA has brought the last part of a tile
  uint64_t full[Tile::kStages], empty[Tile::kStages];
};

}  // namespace flashinfer
