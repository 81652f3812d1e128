// Shapes and shared memory of the products that read weights once (gemm/portable/kernel.cuh).
//
// A warp multiplies 16 rows of the weights by all tokens of the tile: the weights are the left
// operand of mma.m16n8k16, tokens the right one. A stage is 128 bytes of each weight row.
#pragma once

#include <flashinfer/gemm/activation.cuh>
#include <flashinfer/gemm/weight_codes.cuh>
#include <flashinfer/gemm/weight_work.cuh>

namespace flashinfer {

// Config: types A, D, Scale; kFormat, kGroup (elements of k that share a scale; 0: a whole row, or
// no scales), kTokens, kWarps, kSplits (CTAs of a cluster that sum a part of k each), kActivation.
template <typename Config>
struct WeightGemmTile : Config {
  using Config::kFormat, Config::kGroup, Config::kTokens, Config::kWarps, Config::kSplits;
  using Codes = WeightCodes<kFormat, typename Config::A>;

  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = 16 * kWarps;  // rows of the weights, columns of D
  static constexpr int kTokenTiles = kTokens / 8;
  static_assert(kTokenTiles * 8 == kTokens);
  static constexpr bool kGated = is_gated(Config::kActivation);
  static constexpr int kOutColumns = kGated ? kColumns / 2 : kColumns;

  static constexpr int kRowBytes = 128;
  static constexpr int kTileK = kRowBytes * 8 / Codes::kBits;
  // Lane t of four holds elements 8 t to 8 t + 7 of a block, for two instructions.
  static constexpr int kBlockK = 32;
  static constexpr int kBlocks = kTileK / kBlockK;

  static constexpr bool kHasScales = kFormat != WeightFormat::plain;
  static constexpr bool kScalesRows = kHasScales && kGroup == 0;
  static constexpr bool kScalesSums = kHasScales && kGroup != 0 && !Codes::kScalesPairs;
  static_assert(!kScalesSums ||
                (kGroup % kBlockK == 0 && (kTileK % kGroup == 0 || kGroup % kTileK == 0)));
  static_assert(!Codes::kScalesPairs || kGroup == 16);
  // Scales of a row and a stage; each of four lanes loads some.
  static constexpr int kStageScales = kGroup == 0 ? 0 : kGroup < kTileK ? kTileK / kGroup : 1;
  static constexpr int kLaneScales = kStageScales > 4 ? kStageScales / 4 : 1;

  // Stages of weights that are loaded ahead, and stages whose activations are loaded at once. The
  // next ones' activations follow the weights of stage kStages - 1 in the queue of copies.
  static constexpr bool kIsPlain = kFormat == WeightFormat::plain;
  // Codes take long chains of instructions, which many CTAs of an SM hide: theirs are small.
  static constexpr int kChunkStages = kIsPlain ? 8 : 2;
  static constexpr int kStages = !kIsPlain ? 3 : kWarps <= 4 ? 8 : 4;
  static_assert(kStages - 1 <= kChunkStages);
  static constexpr int kStageBytes = 16 * kRowBytes;                // of a warp
  static constexpr int kChunkRowBytes = kChunkStages * kTileK * 2;  // of a token
  static constexpr int kActivationBytes = kTokens * kChunkRowBytes;
  static constexpr int kOffsetActivations = kWarps * kStages * kStageBytes;
  static constexpr int kShift = Codes::kShift, kParts = 1;  // for the epilogue
  static constexpr int kSumStride = kColumns + 4;           // keeps lanes in different banks
  static constexpr int kOffsetRows = kOffsetActivations + 2 * kActivationBytes;
  static constexpr int kSharedBytes = kOffsetRows + 4 * kTokens;
  // CTAs of an SM that registers shall allow; shared memory has no room for two of the large ones.
  static constexpr int kLeastCtas = kTokens == 8 || (kTokens == 16 && kWarps <= 4) ? 2 : 1;
  static_assert(kTokens * kSumStride * 4 <= kSharedBytes, "sums replace the operands");
};

// Finds token tile `index`; false if there is none. All lanes of a warp call; each looks at
// neighbouring groups, so that all offsets are on their way at once.
template <typename Tile>
__device__ __forceinline__ bool find_tokens(const WeightGemmParams& params, uint32_t index,
                                            WeightGemmWork& work) {
  if (params.offsets == nullptr) {
    work = {0, index * Tile::kTokens, params.m, 0};
    return work.row < params.m;
  }
  const uint32_t lane_idx = threadIdx.x % 32;
  const uint32_t share = ceil_div<uint32_t>(params.num_groups, 32), first = lane_idx * share;
  uint32_t tiles = 0;
#pragma unroll 8
  for (uint32_t i = 0; i < share; ++i) tiles += group_tiles<Tile>(group_rows(params, first + i));
  uint32_t sum = tiles;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (static_cast<int>(lane_idx) >= distance) sum += other;
  }
  const uint32_t found = __ballot_sync(0xffffffffu, sum > index);
  if (found == 0) return false;
  const int lane = __ffs(found) - 1;
  uint32_t group = first, before = index - (sum - tiles);  // tiles of this lane before the one
  GroupRows rows = {};
  if (static_cast<int>(lane_idx) == lane) {
    rows = group_rows(params, group);
    for (uint32_t n = group_tiles<Tile>(rows); before >= n; n = group_tiles<Tile>(rows)) {
      before -= n;
      rows = group_rows(params, ++group);
    }
  }
  const uint32_t row = rows.begin + before * Tile::kTokens;
  work = {__shfl_sync(0xffffffffu, group, lane), __shfl_sync(0xffffffffu, row, lane),
          static_cast<uint32_t>(__shfl_sync(0xffffffffu, rows.end, lane)), 0};
  return true;
}

}  // namespace flashinfer
