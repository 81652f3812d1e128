// Shapes and shared memory of the products that stream 4-bit weights on Hopper
// (gemm/sm90/weight_kernel.cuh).
//
// A stage is 16 KiB of the weights: 128 bytes of 128 rows, which are 256 elements of k, or more
// bytes of fewer rows, with the scales and activations of these. Eight warps multiply it, a team:
// each has 32 of the rows and 64 bytes of these. Warps with the same rows add up their sums when a
// tile is done.
//
// A product whose tiles fit on the GPU at once has them visited once: a CTA ends with its tile.
// These tiles have the rows that leave no SM idle, and may have two teams, which take turns at
// stages. Else CTAs are persistent and take tile after tile of 128 rows.
#pragma once

#include <flashinfer/gemm/activation.cuh>
#include <flashinfer/gemm/weight_codes.cuh>
#include <flashinfer/gemm/weight_work.cuh>
#include <flashinfer/ptx/cluster.cuh>

namespace flashinfer {

// Config: as of WeightGemmTile; kWarps is eight of each team; kColumns: rows of the weights of a
// tile that is its CTA's only one, 0 for persistent CTAs.
template <typename Config>
struct WeightStreamTile : Config {
  using Config::kFormat, Config::kGroup, Config::kTokens, Config::kSplits;
  using Scale = typename Config::Scale;
  using Codes = WeightCodes<kFormat, typename Config::A>;
  static_assert(Codes::kBits == 4 && Codes::kIsBfloat);

  static constexpr bool kOnce = Config::kColumns != 0;
  static constexpr int kColumns = kOnce ? Config::kColumns : 128;  // columns of D
  // Warps of a team: of rows, and of a stage's k. Two teams of four share the smallest tile of
  // integers and eight warps, whose small stages come sooner; scales of floats are too many for
  // them.
  static constexpr int kWarps = Config::kWarps;
  static constexpr int kTeamWarps =
      kColumns == 32 && kWarps == 8 && kFormat == WeightFormat::int4 ? 4 : 8;
  static constexpr int kTeams = kWarps / kTeamWarps;
  static constexpr int kSlices = kColumns / 32, kParts = kTeamWarps / kSlices;
  static_assert(kSlices * kParts == kTeamWarps && kTeams * kTeamWarps == kWarps);
  static_assert(kOnce || (kTeams == 1 && kSplits == 1));
  static constexpr int kThreads = 32 * kWarps + 32;  // one warp loads
  // Boxes of rows, of which a gated tile has gates in one.
  static constexpr int kBoxRows = kColumns / 2, kBoxes = 2;
  static_assert(kBoxRows == 16 * kSlices);
  static constexpr bool kGated = is_gated(Config::kActivation);
  static constexpr int kOutColumns = kGated ? kColumns / 2 : kColumns;
  static constexpr int kTokenTiles = kTokens / 8;
  static_assert(kTokenTiles * 8 == kTokens && kTokens <= 32);

  static constexpr int kRowBytes = 128, kTileK = 128 * kParts;
  // A lane has 16 bytes of a row, 32 elements: all of a scale's for MXFP4. So codes are multiplied
  // by their scales, and the tensor cores sum what belongs to different ones.
  static constexpr bool kScalesPairs = Codes::kIsFloat4;
  static constexpr bool kScalesRows = !kScalesPairs && kGroup == 0;
  static constexpr bool kScalesSums = !kScalesPairs && kGroup != 0;
  static_assert(!kScalesSums || kGroup == 128, "a warp's part of a stage has one scale for a row");
  // Scaled codes are 2^kShift too small, so that factors of usual scales are finite.
  static constexpr int kShift = kScalesPairs ? 8 : Codes::kShift;

  // Scales come in boxes of 16 bytes of each row, which are those of some stages.
  static constexpr bool kHasBoxes = kGroup != 0;
  static constexpr int kStageScaleBytes =
      kHasBoxes ? kTileK / (kGroup ? kGroup : 1) * static_cast<int>(sizeof(Scale)) : 16;
  static constexpr int kBoxBytes = kStageScaleBytes < 16 ? 16 : kStageScaleBytes;
  // Boxes begin at multiples of 16 bytes. A team sees the scales of its own stages' barriers alone,
  // so each stage of teams has a box of its own.
  static constexpr uint32_t kBoxStages = kBoxBytes / kStageScaleBytes;
  static_assert(kBoxBytes % kStageScaleBytes == 0);
  static constexpr int kBoxStep = kBoxStages * kStageScaleBytes / static_cast<int>(sizeof(Scale));

  static constexpr int kStageBytes = kColumns * kTileK / 2;
  static constexpr int kScaleBytes = kHasBoxes ? kColumns * kBoxBytes : 0;
  // Rows of activations are 16 bytes longer than the copies, for the banks of different tokens.
  // The activations of a CTA's only tile come as one box, 128 bytes of all tokens at a time, with
  // the 128-byte swizzle.
  static constexpr int kTokenBytes = kTileK * 2, kTokenStride = kTokenBytes + (kOnce ? 0 : 16);
  static constexpr int kActivationBytes = kTokens * kTokenStride;
  // Sums of a tile: by token and row in persistent CTAs. Else a CTA's warps add theirs up where
  // stages were, and these are for sums of all CTAs of a cluster, in blocks of 16 rows that one CTA
  // adds up, 512 bytes for eight tokens.
  static constexpr int kSumStride = kColumns + 4;
  static constexpr int kBlocks = kColumns / 16, kBlockBytes = kTokenTiles * 512;
  static constexpr int kOwnedBlocks = ceil_div(kBlocks, kSplits);  // of a CTA, at most
  static constexpr int kSumBytes = !kOnce         ? kParts * kTokens * kSumStride * 4
                                   : kSplits == 1 ? 0
                                                  : kOwnedBlocks * kSplits * kBlockBytes;
  static_assert(!kOnce || !kGated, "a warp has gates and values in different blocks");
  static_assert(kSplits <= kBlocks, "every CTA of a cluster adds up some rows");
  // Only products of persistent CTAs are in groups.
  static constexpr int kMaxGroups = 1024, kTableBytes = !kOnce ? (kMaxGroups + 4) * 4 : 0;

  static constexpr int kLeastCtas = kTokens <= 16 && kWarps == 8 ? 2 : 1;  // of an SM
  static constexpr int kMaxBytes = ((228 << 10) / kLeastCtas - 1024) & ~127;
  static constexpr int kFittingStages = (kMaxBytes - kSumBytes - kTableBytes - 8) /
                                        (kStageBytes + kScaleBytes + kActivationBytes + 16);
  static constexpr int kStages = kFittingStages < 8 ? kFittingStages : 8;
  static_assert(kStages >= 2 && kStages >= kTeams);

  static constexpr int kOffsetActivations = kStages * kStageBytes;
  static constexpr int kOffsetScales = kOffsetActivations + kStages * kActivationBytes;
  static constexpr int kOffsetSums = kOffsetScales + kStages * kScaleBytes;
  static constexpr int kOffsetTable = kOffsetSums + kSumBytes;
  static constexpr int kOffsetBarriers = kOffsetTable + kTableBytes;
  // Two barriers of each stage, and one that other CTAs' sums complete.
  static constexpr int kOffsetSplitBarrier = kOffsetBarriers + kStages * 16;
  static constexpr int kSharedBytes = kOffsetSplitBarrier + 8;
};

// Position in the ring of stages and of boxes of scales. A box may serve several stages, so that
// they have a ring of their own, as long: a box is overwritten after its last stage was read.
template <typename Tile>
struct WeightRing {
  uint32_t stage = 0, phase = 0, box = Tile::kStages - 1;

  __device__ __forceinline__ void advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance_box() {
    if (++box == Tile::kStages) box = 0;
  }
};

// Stages of k that a CTA sums: all, or its part of a split product.
template <typename Tile>
struct WeightStages {
  uint32_t first, count;

  __device__ __forceinline__ explicit WeightStages(uint32_t k) {
    const uint32_t stages = ceil_div<uint32_t>(k, Tile::kTileK);  // the last may be a part
    const uint32_t split = Tile::kSplits > 1 ? ptx::cluster_rank() : 0;
    first = stages * split / Tile::kSplits;
    count = stages * (split + 1) / Tile::kSplits - first;
  }

  // Whether stage `i` of this CTA needs another box of scales than the one before.
  __device__ __forceinline__ bool begins_box(uint32_t i) const {
    return Tile::kHasBoxes && (Tile::kTeams > 1 || i == 0 || (first + i) % Tile::kBoxStages == 0);
  }
};

// The tiles that a cluster computes: of all, numbered so that tiles of the same weights are
// neighbours, every one after the number of clusters; a single one where CTAs have one tile.
// Producer and consumers each have such a schedule.
template <typename Tile>
class WeightSchedule {
 public:
  // `table`: for each group, the tiles of tokens before it, and then their total.
  __device__ __forceinline__ WeightSchedule(const WeightGemmParams& params, const uint32_t* table)
      : params_(params), table_(table) {
    const uint32_t n = Tile::kGated ? params.n / 2 : params.n;
    columns_ = ceil_div<uint32_t>(n, Tile::kOutColumns);
    index_ = blockIdx.x / Tile::kSplits;
    const uint32_t token_tiles = params.offsets == nullptr
                                     ? ceil_div<uint32_t>(params.m, Tile::kTokens)
                                     : table[params.num_groups];
    count_ = token_tiles * columns_;
  }

  // One warp sums the tiles before each group.
  __device__ __forceinline__ static void make_table(const WeightGemmParams& params,
                                                    uint32_t* table) {
    if (params.offsets == nullptr) return;
    const uint32_t lane_idx = threadIdx.x % 32;
    uint32_t before = 0;
    for (uint32_t first = 0; first < params.num_groups; first += 32) {
      const uint32_t group = first + lane_idx;
      uint32_t sum = group_tiles<Tile>(group_rows(params, group));
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (static_cast<int>(lane_idx) >= distance) sum += other;
      }
      if (group < params.num_groups) table[group + 1] = before + sum;
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane_idx == 0) table[0] = 0;
  }

  // The next tile; false if there is none.
  __device__ __forceinline__ bool next(WeightGemmWork& work) {
    if (index_ >= count_) return false;
    uint32_t group = 0, first = 0, tiles = count_ / columns_;
    if (params_.offsets != nullptr) {
      group = find_group(index_ / columns_);
      first = table_[group];
      tiles = table_[group + 1] - first;
    }
    const uint32_t within = index_ - first * columns_, column = within / tiles;
    GroupRows rows = {0, static_cast<int32_t>(params_.m)};
    if (params_.offsets != nullptr) rows = group_rows(params_, group);
    uint32_t row = rows.begin + (within - column * tiles) * Tile::kTokens;
    // A box of activations ends with the last token: the copy engine fills up missing ones slowly.
    // Tokens of two tiles get the same sums twice.
    if (Tile::kOnce && tiles > 1) row = min(row, params_.m - Tile::kTokens);
    work = {group, row, static_cast<uint32_t>(rows.end), column * Tile::kOutColumns};
    index_ += gridDim.x / Tile::kSplits;
    return true;
  }

 private:
  // The group of token tile `index`.
  __device__ __forceinline__ uint32_t find_group(uint32_t index) const {
    uint32_t low = 0, high = params_.num_groups;  // tiles before low <= index < before high
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      if (table_[middle] <= index) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  const WeightGemmParams& params_;
  const uint32_t* table_;
  uint32_t columns_, index_, count_;
};

}  // namespace flashinfer
