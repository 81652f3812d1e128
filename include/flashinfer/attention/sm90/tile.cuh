// Shapes and shared memory of the Hopper attention kernel (attention.cuh).
//
// A CTA holds kTileQ packed query rows, 64 per consumer warpgroup, and streams K and V in tiles of
// kTileKV tokens through rings of stages. Operands lie in shared memory as the tensor cores read
// them: chunks of 128 bytes of columns, each with rows of 128 bytes in the 128-byte swizzle.
//
// The tensor cores need 8-bit operands contiguous along the summed dimension. V is not contiguous
// along tokens, so the producer fills a second ring with transposed tiles, a row per column of v.
#pragma once

#include <cstdint>
#include <type_traits>
#include <flashinfer/attention/attention_params.h>
#include <flashinfer/attention/kv_tiles.h>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/ptx/ring.cuh>

namespace flashinfer {

// Layout of K or V rows of `kDim` columns in a stage. If a page arrives as one box, a group of
// eight rows has its chunks together; otherwise a chunk has all rows together.
template <typename Traits, int kDim>
struct HopperRows {
  using Tile = typename Traits::Tile;
  static constexpr bool kByPage =
      Traits::kPaged && sizeof(typename Tile::KV) == 2 && kDim % 64 == 0;
  static constexpr int kChunks = ceil_div(kDim, Tile::kChunkColumns);
  // Distance between chunks.
  static constexpr int kChunkBytes = kByPage ? 1024 : Tile::kTileKV * 128;
  static constexpr int kGroupBytes = kByPage ? kChunks * 1024 : 1024;  // bytes of eight rows

  __device__ __forceinline__ static uint32_t offset(int row, int column) {
    return column / 8 * kChunkBytes + row / 8 * kGroupBytes + row % 8 * 128 +
           ((column ^ row) % 8) * 16;
  }
};

// Registers per thread of each warpgroup.
struct HopperRegisters {
  int producer, consumer, widener;
};

// A launch gives each thread 168 registers; 128 with three consumers or a widener; 96 with both.
// Producers and wideners give some of theirs to consumers. Transposing needs more than loading.
inline constexpr HopperRegisters hopper_registers(OperandForm products, int consumers, int tile_kv,
                                                  int head_dim_vo) {
  if (products == OperandForm::k16Bit) {
    return consumers == 3 ? HopperRegisters{32, 160, 0} : HopperRegisters{56, 224, 0};
  }
  if (products == OperandForm::k8Bit) {
    if (head_dim_vo > 128) return {88, 208, 0};
    return head_dim_vo <= 96 ? HopperRegisters{80, 144, 0} : HopperRegisters{56, 152, 0};
  }
  if (consumers == 3) return {72, 120, 48};
  if (head_dim_vo > 128) return {48, 208, 48};
  return tile_kv == 64 ? HopperRegisters{80, 176, 80} : HopperRegisters{64, 200, 48};
}

template <typename Q_, typename KV_, typename O_, int kHeadDimQK_, int kHeadDimVO_, int kConsumers_>
struct HopperTile {
  using Q = Q_;
  using KV = KV_;
  using O = O_;
  // 8-bit K and V become 16-bit between load and product (widener.cuh).
  static constexpr bool kWidens = sizeof(Q) == 2 && dtype::kIsFloat8<KV>;
  // Types in the products: of queries, and of keys and values. 8-bit weights need e4m3's precision.
  using Mma = std::conditional_t<kWidens, dtype::float16, Q>;
  using Key = std::conditional_t<kWidens, dtype::float16, KV>;
  static constexpr int kElement = sizeof(Mma);
  static constexpr bool kProductsAre8Bit = kElement == 1;
  static constexpr bool kConvertsQuery = kWidens && !std::is_same_v<Q, Mma>;
  using Weight = std::conditional_t<kProductsAre8Bit, dtype::float8_e4m3fn, Mma>;
  static_assert(kWidens || std::is_same_v<Q, KV> || (kProductsAre8Bit && dtype::kIsFloat8<KV>),
                "q, k and v are of one type of 16 bits, or k and v of 8 bits");
  static_assert(sizeof(O) == 2);

  static constexpr int kHeadDimQK = kHeadDimQK_;
  static constexpr int kHeadDimVO = kHeadDimVO_;
  static_assert(kHeadDimQK % 16 == 0 && kHeadDimQK <= 256);
  static_assert(kHeadDimVO == 64 || kHeadDimVO == 96 || kHeadDimVO % 128 == 0);

  static constexpr int kConsumers = kConsumers_;  // warpgroups
  static constexpr int kTileQ = 64 * kConsumers;
  static constexpr OperandForm kForm = kProductsAre8Bit ? OperandForm::k8Bit
                                       : kWidens        ? OperandForm::kWidened
                                                        : OperandForm::k16Bit;
  static constexpr HopperStages kShape = hopper_stages(kForm, kConsumers, kHeadDimQK, kHeadDimVO);
  static constexpr int kTileKV = kShape.tile_kv, kStages = kShape.stages;
  // The packed rows of a head group span few tokens, so an item's first tile, which holds its last
  // tokens, is often at most half full.
  static constexpr bool kHalvesTiles = kElement == 2 && kTileKV == 128;
  static constexpr bool kTransposesV = kProductsAre8Bit;
  static constexpr int kConsumerThreads = 128 * kConsumers;
  // One more warpgroup is the producer; the last one, if any, is the widener.
  static constexpr int kThreads = kConsumerThreads + (kWidens ? 256 : 128);
  static constexpr HopperRegisters kRegisters =
      hopper_registers(kForm, kConsumers, kTileKV, kHeadDimVO);

  // Interface to ../rows.cuh and ../row_writer.cuh: a warp has 16 rows and all tokens.
  static constexpr int kInterleavedTiles = kTransposesV ? 2 : 1;
  static constexpr bool kScalesQuery = kConvertsQuery;
  static constexpr bool kHidesByMinimum = true, kDoublesRows = false;
  static constexpr bool kCapsWeights = !kProductsAre8Bit;  // for 8 bits there are no registers
  static constexpr bool kSplitKV = false;
  static constexpr int kWarpRows = 16;
  static constexpr int kRowTiles = 1;
  static constexpr bool kNarrow = false;
  static constexpr int kWarpKV = kTileKV;
  static constexpr int kTokenTiles = kTileKV / 8;
  static constexpr int kOutputDim = kHeadDimVO;
  static constexpr int kNumOutputParts = 1;
  static constexpr int kOutputTiles = kHeadDimVO / 8;

  static constexpr int kChunkColumns = 128 / kElement;
  static constexpr int kStepTokens = 32 / kElement;  // summed over by one instruction
  static constexpr int kChunksQK = ceil_div(kHeadDimQK, kChunkColumns);
  static constexpr int kChunksVO = ceil_div(kHeadDimVO, kChunkColumns);
  static constexpr int kBytesQ = kTileQ * kChunksQK * 128;
  static constexpr int kBytesK = kTileKV * kChunksQK * 128;
  // Sizes of 8-bit tiles as they are loaded, before they are widened or transposed.
  static constexpr int kLoadedStages = kWidens ? 1 : kStages;
  static constexpr int kLoadedColumns = 128 / static_cast<int>(sizeof(KV));  // per chunk
  static constexpr int kLoadedChunksQK = ceil_div(kHeadDimQK, kLoadedColumns);
  static constexpr int kLoadedChunksVO = ceil_div(kHeadDimVO, kLoadedColumns);
  static constexpr int kBytesLoadedK = kTileKV * kLoadedChunksQK * 128;
  static constexpr int kBytesLoadedV = kTileKV * kLoadedChunksVO * 128;
  static constexpr int kBytesV =
      kTransposesV ? kHeadDimVO * ceil_div(kTileKV, 128) * 128 : kTileKV * kChunksVO * 128;
  static constexpr int kBytesOutput = kTileQ * ceil_div(kHeadDimVO, 64) * 128;
  static constexpr int kBytesStages =
      kStages * (kBytesK + kBytesV) +
      kLoadedStages *
          ((kWidens ? kBytesLoadedK : 0) + (kTransposesV || kWidens ? kBytesLoadedV : 0));
  // Finished rows overwrite q where shared memory has no room for both; the next q then has to
  // wait.
  static constexpr int kMaxBytes = 226 << 10;
  static constexpr bool kOutputOverQ = kBytesQ + kBytesStages + kBytesOutput > kMaxBytes;
  // An item begins while the one before it ends: its first q k^T is issued with that item's last p
  // v. This is impossible where the output overwrites q, and would spill where registers are few.
  // With three warpgroups of 8-bit products, the other warpgroups' tiles fill the gap instead.
  static constexpr bool kPipelinesItems =
      !kOutputOverQ && kHeadDimVO <= 128 && !kWidens && kElement == 2;
  static constexpr int kStagesQ = 2 * kBytesQ + kBytesStages + kBytesOutput > kMaxBytes ? 1 : 2;
  static constexpr int kOffsetK =
      kOutputOverQ && kBytesOutput > kBytesQ ? round_up(kBytesOutput, 1024) : kStagesQ * kBytesQ;
  static constexpr int kOffsetV = kOffsetK + kStages * kBytesK;
  static constexpr int kOffsetLoadedV =
      kTransposesV || kWidens ? kOffsetV + kStages * kBytesV : kOffsetV;
  static constexpr int kOffsetLoadedK =
      kWidens ? kOffsetLoadedV + kLoadedStages * kBytesLoadedV : kOffsetK;
  static constexpr int kOffsetEnd = kOffsetK + kBytesStages;
  static constexpr int kOffsetOutput = kOutputOverQ ? 0 : kOffsetEnd;
  static constexpr int kOffsetControl = kOutputOverQ ? kOffsetEnd : kOffsetOutput + kBytesOutput;
};

// Whether a kernel has few forms of a tile's code: items in turn, no steps skipped, first tiles
// that all hide keys, weights that are made again by the same code. Other forms save up to a tenth
// of the time, but where ptxas lacks registers for them (C7511), products wait for each other.
template <typename Traits>
constexpr bool hopper_has_few_forms() {
  using Tile = typename Traits::Tile;
  constexpr bool kCaps = Traits::Variant::kCapsLogits, kSinks = Traits::Variant::kHasMDUpdate;
  constexpr int kHeadDim = Tile::kHeadDimVO;
  // Hooks that see logits are in each form.
  if (Traits::kUserVariant || (Traits::Variant::kHasLogitsTransform && !kCaps)) return true;
  if (kCaps && (Tile::kProductsAre8Bit || kSinks)) return true;
  if (!Tile::kPipelinesItems) return false;
  if (Traits::kMask == MaskMode::custom) return kSinks || Traits::kWindow;
  if (kHeadDim == 64 && kCaps) return !Traits::kPaged && !Traits::kWindow;
  return (kHeadDim == 64 && Traits::kWindow && !kSinks) ||
         (kHeadDim == 96 && kSinks && !Traits::kWindow);
}

// Whether a warp's finished rows leave as one box of chunks; otherwise each chunk has its own box,
// and the last one is cut off.
template <typename Tile>
inline constexpr bool kStoresOneBox = Tile::kHeadDimVO % 64 == 0;

// What producer and consumers share: work items and barriers.
struct HopperControl {
  struct alignas(16) Work {
    WorkItem item;
    uint32_t kv_head;
  };
  static constexpr int kMaxStages = 3;
  // One item ends, one runs and one is being loaded; the number is a power of two.
  static constexpr int kWorkStages = 4;
  Work work[kWorkStages];
  uint64_t work_full[kWorkStages], work_empty[kWorkStages];
  uint64_t q_full[2], q_empty[2];
  uint64_t k_full[kMaxStages], k_empty[kMaxStages];
  uint64_t v_full[kMaxStages], v_empty[kMaxStages];
  // Barriers of tiles to be widened, and of v to be transposed.
  uint64_t loaded_k_full[kMaxStages], loaded_k_empty[kMaxStages];
  uint64_t loaded_v_full[kMaxStages], loaded_v_empty[kMaxStages];
  // Inverse scales of converted query rows, where more than the softmax reads their logits.
  float inverse_query_scale[192];
};

template <typename Tile>
inline constexpr int kHopperSharedBytes =
    Tile::kOffsetControl + static_cast<int>(sizeof(HopperControl));

}  // namespace flashinfer
