// Shapes and shared memory of the matrix products for Hopper (gemm/sm90/kernel.cuh).
//
// The tensor cores multiply a left operand, 64 rows per warpgroup, by a right one of 8 to 256 rows;
// both are K-major. The left operand has the rows of A, the right one the rows of B. With kSwap it
// is the reverse: few tokens then need a narrow right operand, not a left one that is mostly
// padding.
//
// A stage is 128 bytes of k of both operands, in rows of 128 bytes with the 128-byte swizzle.
#pragma once

#include <cstdint>
#include <type_traits>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/gemm/gemm_params.h>
#include <flashinfer/ptx/cluster.cuh>

namespace flashinfer {

// Config: types A, B, D; kTileRows, kTileColumns (of D), kConsumers, kSwap, kClusterRows,
// kClusterColumns, kSplits, kMaxStages, kScale, kGroups, kActivation, kGathers.
template <typename Config>
struct GemmTile : Config {
  using A = typename Config::A;
  using B = typename Config::B;
  using D = typename Config::D;
  using Config::kClusterRows, Config::kClusterColumns, Config::kSplits, Config::kScale;
  using Config::kTileRows, Config::kTileColumns, Config::kConsumers, Config::kSwap;
  using Left = std::conditional_t<kSwap, B, A>;
  using Right = std::conditional_t<kSwap, A, B>;

  static constexpr int kElement = sizeof(A);
  static_assert(sizeof(B) == kElement, "both operands are of 16 bits or of 8");
  static constexpr int kTileK = 128 / kElement;
  static constexpr int kLeftRows = kSwap ? kTileColumns : kTileRows;
  // Two warpgroups have 64 left rows in common, and half of the right rows each.
  static constexpr bool kDividesRight = kConsumers == 2 && kLeftRows == 64;
  static constexpr int kRightGroups = kDividesRight ? 2 : 1;
  static constexpr int kLeftGroups = kConsumers / kRightGroups;
  // Which of the left and of the right rows' parts a warpgroup has.
  __device__ __forceinline__ static constexpr int left_group(int warpgroup_idx) {
    return kDividesRight ? 0 : warpgroup_idx;
  }
  __device__ __forceinline__ static constexpr int right_group(int warpgroup_idx) {
    return kDividesRight ? warpgroup_idx : 0;
  }
  static constexpr int kRightRows = (kSwap ? kTileRows : kTileColumns) / kRightGroups;
  static constexpr int kReps = kLeftRows / (64 * kLeftGroups);  // of 64 rows, per warpgroup
  static constexpr int kTiles = kRightRows / 8;
  static_assert(kReps * 64 * kLeftGroups == kLeftRows && kTiles * 8 == kRightRows);

  // A tile of 192 columns in one product. The last columns of a matrix may have one of one or two
  // thirds, which takes as much less time.
  static constexpr bool kThirds = kScale == GemmScale::block && kTileColumns == 192 && !kSwap;

  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kThreads = kConsumerThreads + 128;
  // Threads that copy scales and rows hold more addresses than one that asks the copy engine.
  static constexpr int kProducerRegisters =
      kThirds                                                                    ? 56
      : Config::kScale == GemmScale::block || Config::kScale == GemmScale::group ? 72
      : Config::kGathers                                                         ? 56
                                                                                 : 40;
  // Few rows of few columns leave registers and shared memory of an SM to the small kernels before:
  // theirs and these CTAs wait beside each other then, and weights arrive meanwhile.
  static constexpr bool kLeavesRoom = kDividesRight && kTileColumns == 128;
  static constexpr int kLaunchThreads = kLeavesRoom ? 512 : kThreads;  // that registers are for
  static constexpr int kConsumerRegisters = kLeavesRoom ? 152 : 252 - kProducerRegisters / 2;
  // A single consumer has the most registers per thread from the start.
  static constexpr bool kMovesRegisters = kConsumers > 1;

  // Tensor cores sum 8-bit products with fewer bits than float32, so partial sums of 128 products
  // are added up in float32.
  static constexpr bool kPromotes = kElement == 1;
  // Products that wait for promotion take registers besides the sums.
  static constexpr int kParts = kTiles > 16 && !kThirds ? 2 : 1;
  static constexpr bool kBlockScales = kScale == GemmScale::block || kScale == GemmScale::group;
  static_assert(!kBlockScales || kPromotes);
  // Rows of A come through an index map: threads copy them, where else the copy engine does.
  static constexpr bool kGathers = Config::kGathers;
  static constexpr GemmActivation kActivation = Config::kActivation;
  static constexpr bool kGated = is_gated(kActivation);
  static constexpr bool kGrouped = Config::kGroups != GemmGroups::batch;
  // Small tiles of one matrix, for few rows. They are found before the wait for the preceding
  // kernel, and more scales are copied at a time: docs/tuning/gemm_few.md.
  static constexpr bool kFewRows =
      kScale == GemmScale::block && !kGrouped && !kGathers && !kGated && sizeof(D) == 2 &&
      kTileRows * kTileColumns <= 128 * 128 && kReps == 1 && kParts == 1;

  // CTAs of a cluster share an operand by multicast, split k among them, or both.
  static constexpr int kMulticast = kClusterRows * kClusterColumns;
  static constexpr int kCluster = kMulticast * kSplits;
  // CTAs that share an operand load a part of it each, for all; so many read what one loads.
  static constexpr int kSharedA = kClusterColumns, kSharedB = kClusterRows;
  static constexpr int kReaders = kSharedA + kSharedB - 1;

  // B's rows of a tile come in boxes; where the activation is gated, gate and up rows take turns,
  // so that a thread has both sums.
  static constexpr int kBoxRowsB = kThirds   ? 64
                                   : !kGated ? kTileColumns
                                   : kSwap   ? 64
                                             : kRightRows / 2;
  static constexpr int kBoxesB = kTileColumns / kBoxRowsB;
  static_assert(!kGated || !kSwap || kReps == 2, "a warpgroup has 64 gate rows and their up rows");
  static constexpr int kOutColumns = kGated ? kTileColumns / 2 : kTileColumns;

  static constexpr int kBytesA = kTileRows * 128, kBytesB = kTileColumns * 128;
  static constexpr int kStageBytes = kBytesA + kBytesB;

  // The number of CTAs, at most `splits`, that have equally many of `tiles`.
  static constexpr int owners(int tiles, int splits) {
    return tiles % splits == 0 ? splits : owners(tiles, splits - 1);
  }
  // Groups of eight right rows that each CTA of a split product adds up and stores.
  static constexpr int kOwnedTiles = kTiles / owners(kTiles, kSplits);
  static constexpr int kPartialBytes =
      kSplits > 1 ? kSplits * kReps * kOwnedTiles * kConsumerThreads * 16 : 0;

  // Finished sums go through shared memory, per warpgroup: 64 left rows by up to 64 right ones,
  // two bytes each, so many that they make boxes of D. 32-bit results leave from registers.
  // 8-bit results wait as 16-bit numbers that represent all of them.
  static constexpr bool kStagesOutput = sizeof(D) <= 2;
  static constexpr bool kQuantizes = sizeof(D) == 1, kQuantizesBlocks = kQuantizes && kBlockScales;
  using Staged = std::conditional_t<kQuantizes, dtype::float16, D>;
  static constexpr int kOutRights = kGated && !kSwap ? kRightRows / 2 : kRightRows;
  static constexpr int kStoreRights = kSplits > 1                ? kOwnedTiles * 8
                                      : kOutRights % 64 == 0     ? 64
                                      : kOutRights % 32 == 0     ? 32
                                      : kSwap || kOutRights < 16 ? kOutRights
                                                                 : 16;
  static_assert(kOutRights % kStoreRights == 0);
  static constexpr int kBoxColumns = kSwap ? 64 : kStoreRights;
  static constexpr int kBoxRows = kSwap ? kStoreRights : 64;
  static constexpr int kStoreBytes = kStagesOutput ? round_up(kBoxRows * kBoxColumns * 2, 1024) : 0;

  // Boxes of D that each warpgroup stores.
  static constexpr int kStoreBoxes = kReps * kOutRights / kStoreRights;

  // The largest value of each warp's columns, for each row: of a block that several warps have.
  static constexpr int kMaximaBytes =
      kQuantizesBlocks && (kSwap || kDividesRight) ? kConsumers * 4 * kTileRows * 4 : 0;

  // A block of k has one scale for each row, and this many for the columns.
  static constexpr int kColumnScales =
      kScale == GemmScale::group ? kTileColumns : kBoxesB * ceil_div(kBoxRowsB, 128);
  // Consumers of few sums multiply so many blocks of k without finding each one's place.
  static constexpr int kFour = 4;
  // Scales are copied for four blocks of k at a time, since less than 16 bytes is no box. 64 bytes
  // of a row take the copy engine no longer, which small tiles keep busy (docs/tuning/gemm_few.md).
  static constexpr int kScaleBlocks = kFewRows ? 16 : 4;
  static constexpr int kScaleStages = !kBlockScales ? 0 : kFewRows || kTileRows > 128 ? 2 : 4;
  static constexpr int kColumnScaleBytes = round_up(kColumnScales * 4, 16);
  static constexpr int kScaleBytes =
      round_up(kScaleBlocks * (kTileRows * 4 + kColumnScaleBytes), kFewRows ? 512 : 128);

  static constexpr int kMaxGroups = 1024;
  static constexpr bool kHasTable = Config::kGroups == GemmGroups::offsets ||
                                    Config::kGroups == GemmGroups::lengths ||
                                    Config::kGroups == GemmGroups::masked;
  static constexpr int kTableBytes = kHasTable ? (kMaxGroups + 2) * 8 : 0;
  static constexpr int kMaxBytes = (kLeavesRoom ? 214 : 227) << 10;
  static constexpr int fitting_stages(int store_buffers) {
    const int fixed = store_buffers * kConsumers * kStoreBytes + kPartialBytes + kTableBytes +
                      kMaximaBytes + kScaleStages * kScaleBytes + 80;
    const int stages = (kMaxBytes - fixed) / (kStageBytes + 16);
    return stages < Config::kMaxStages ? stages : Config::kMaxStages;
  }
  // All CTAs store at the same time, more than L2 takes at once. A large tile with three stages
  // waits for that as a whole, and the next one is multiplied meanwhile (docs/tuning/gemm.md).
  static constexpr bool kStoresWhole = kStagesOutput && !kQuantizes && !kGated && !kSwap &&
                                       kSplits == 1 && kTileRows * kTileColumns > 128 * 128 &&
                                       fitting_stages(kStoreBoxes) == fitting_stages(1);
  static_assert(kStoresWhole || !kThirds, "tiles of fewer thirds are stored as wholes alone");
  // With two buffers a warpgroup fills one while the other is stored, but a stage is worth more.
  static constexpr int kStoreBuffers = kStoresWhole                             ? kStoreBoxes
                                       : fitting_stages(2) == fitting_stages(1) ? 2
                                                                                : 1;
  static constexpr int kFitting = fitting_stages(kStoreBuffers);
  // Consumers of few sums take the stages of four blocks together.
  static constexpr int kStages =
      kBlockScales && kFitting >= 2 * kFour ? kFitting / kFour * kFour : kFitting;
  static_assert(kStages >= 2, "two stages do not fit");

  static constexpr int kOffsetStore = kStages * kStageBytes;
  static constexpr int kOffsetPartial = kOffsetStore + kStoreBuffers * kConsumers * kStoreBytes;
  static constexpr int kOffsetMaxima = kOffsetPartial + kPartialBytes;
  static constexpr int kOffsetScales = kOffsetMaxima + kMaximaBytes;
  static_assert(!kFewRows || kOffsetScales % 512 == 0, "the copy engine swizzles 512 bytes");
  static constexpr int kOffsetTable = kOffsetScales + kScaleStages * kScaleBytes;
  static constexpr int kOffsetControl = kOffsetTable + kTableBytes;
};

template <typename Tile>
struct GemmControl {
  uint64_t full[Tile::kStages], empty[Tile::kStages];
  // The first completes when the other CTAs' sums of a split product have arrived, the second when
  // all CTAs have read theirs.
  uint64_t split_full, split_empty;
  uint64_t scales_full[4], scales_empty[4];
};

template <typename Tile>
inline constexpr int kGemmSharedBytes =
    Tile::kOffsetControl + static_cast<int>(sizeof(GemmControl<Tile>));

// Place of a CTA in its cluster.
template <typename Tile>
struct GemmPlace {
  uint32_t row = 0, column = 0;  // of the cluster's tiles
  uint32_t split = 0;            // among those that split k

  __device__ __forceinline__ GemmPlace() {
    if constexpr (Tile::kCluster > 1) {
      const uint32_t rank = ptx::cluster_rank();
      column = rank % Tile::kClusterColumns;
      row = rank / Tile::kClusterColumns % Tile::kClusterRows;
      split = rank / Tile::kMulticast;
    }
  }

  // Whether this CTA is number `i` of those that split k. The answer is opaque: the compiler would
  // find sums by the number, keep them in memory, and then make products wait for each other.
  __device__ __forceinline__ bool is_split(uint32_t i) const {
    uint32_t same = split == i;
    asm volatile("" : "+r"(same));
    return same != 0;
  }

  __device__ __forceinline__ static uint32_t rank(uint32_t row, uint32_t column, uint32_t split) {
    return split * Tile::kMulticast + row * Tile::kClusterColumns + column;
  }

  // Bits of the CTAs that read the same rows of A, and of B.
  __device__ __forceinline__ uint32_t readers_of_a() const {
    return ((1u << Tile::kClusterColumns) - 1) << rank(row, 0, split);
  }
  __device__ __forceinline__ uint32_t readers_of_b() const {
    uint32_t bits = 0;
    for (int r = 0; r < Tile::kClusterRows; ++r) bits |= 1u << rank(r, column, split);
    return bits;
  }

  // CTA `i` among those whose loads this one reads.
  __device__ __forceinline__ uint32_t loader(uint32_t i) const {
    if (i < Tile::kClusterColumns) return rank(row, i, split);
    return rank((row + 1 + i - Tile::kClusterColumns) % Tile::kClusterRows, column, split);
  }
};

// Position in the ring of stages. Consumers wait for the phase, producers for the other parity,
// which a new barrier counts as complete.
template <int kStages>
struct GemmRing {
  uint32_t stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace flashinfer
