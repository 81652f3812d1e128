// Shapes of an attention tile.
//
// A CTA of four warps holds `kTileQ` packed query rows and streams K and V in tiles of 64 tokens.
// With kTileQ 4, 8 or 16 (decode) the warps share the query rows, and each takes 16 tokens of every
// K/V tile. With kTileQ 64 or 128 each warp takes 16 or 32 query rows and all tokens. In both cases
// a warp loads 16 tokens of each tile.
//
// Tiles of 4 or 8 query rows with large heads have two warps for 16 tokens, which take half of the
// columns of K and V each and exchange their parts of the logits; a tile then has 32 tokens. One
// warp would have no registers for the output, and three tiles of 64 tokens would not fit.
//
// An mma product has 16 rows. Tiles of up to 8 query rows (narrow) therefore compute both products
// transposed: the rows are tokens or columns of v, and the 8 columns are the query rows. This takes
// 16 products instead of 32 for 16 tokens of 128 columns, half the exponentials and half the
// registers.
//
// Tiles of 4 query rows, of 4-bit K and V alone, hold each row twice: a column of the product and
// the one 4 further on have the same weights until those are multiplied by scales of v, of the one
// or the other half of a lane's columns of v.
//
// Measurements, also of what lost: docs/tuning/attention_decode.md,
// docs/tuning/attention_decode_options.md.
#pragma once

#include <cstdint>
#include <type_traits>
#include <flashinfer/attention/attention_params.h>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/float4_pairs.cuh>
#include <flashinfer/attention/kv_tiles.h>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/shared_limit.h>
#include <flashinfer/layout/shared_rows.cuh>

namespace flashinfer {

inline constexpr int kAttentionThreads = 128;
inline constexpr int kAttentionWarps = kAttentionThreads / 32;

// `kTransformsKeys`: K rows are transformed in shared memory, where a warp needs them whole. Rows
// of 8 bits have no room for what becomes of them: they are widened to a place of their own.
template <typename Q_, typename KV_, typename O_, int kHeadDimQK_, int kHeadDimVO_, int kTileQ_,
          bool kTransformsKeys = false>
struct TileTraits {
  using Q = Q_;
  using KV = KV_;
  using O = O_;
  static constexpr bool kKeysAre8Bit = dtype::kIsFloat8<KV>;
  static constexpr bool kKeysAre4Bit = std::is_same_v<KV, dtype::uint8>;  // e2m1, scales of 16
  static constexpr bool kConvertsKeys = kKeysAre8Bit || kKeysAre4Bit;
  // K and V of fewer bits are multiplied as float16, which represents all their values: products of
  // a 4-bit code and its scale have six bits and, left 2^14 too small, no more exponents.
  using Mma = std::conditional_t<kConvertsKeys, dtype::float16, KV>;
  static_assert(kConvertsKeys || std::is_same_v<Q, KV>, "16-bit q, k and v are of one type");
  static constexpr float kUnit = kKeysAre4Bit ? kE2m1Unit<Mma> : 1.f;  // that k and v leave out
  static constexpr bool kWidensKeys = kTransformsKeys && kKeysAre8Bit;
  static constexpr bool kMultipliesKeysOf8Bits = kKeysAre8Bit && !kWidensKeys;
  // The largest e5m2 is that of float16, nearly, and a rotation makes numbers up to sqrt(2) times
  // as large: rotated keys leave out a factor, and rows of queries are scaled.
  template <typename T>
  static constexpr bool kLeavesRange = kWidensKeys && std::is_same_v<T, dtype::float8_e5m2>;
  static constexpr float kUnitK = kLeavesRange<KV> ? 2.f : kUnit;  // that k leaves out
  static constexpr bool kScalesQuery = kKeysAre4Bit || kLeavesRange<KV> || kLeavesRange<Q> ||
                                       (kKeysAre8Bit && std::is_same_v<Q, dtype::bfloat16>);

  static constexpr int kHeadDimQK = kHeadDimQK_;
  static constexpr int kHeadDimVO = kHeadDimVO_;
  static constexpr int kTileQ = kTileQ_;
  static constexpr bool kSplitKV = kTileQ <= 16;  // the warps share the tokens
  static constexpr bool kNarrow = kTileQ <= 8;
  // Each row stands twice among the 8 columns of a narrow product, so that a factor of p v can
  // depend on the half of the columns of v in which a lane's output is.
  static constexpr bool kDoublesRows = kTileQ == 4;
  static_assert(!kDoublesRows || kKeysAre4Bit, "only scales of 4-bit values need rows twice");
  // Warps that share the columns of the same tokens.
  static constexpr int kColumnStep = kKeysAre4Bit ? 128 : 32;
  static constexpr bool kPairsWarps = kNarrow && (kHeadDimQK > 256 || kHeadDimVO > 256) &&
                                      kHeadDimQK % kColumnStep == 0 &&
                                      kHeadDimVO % kColumnStep == 0 && !kTransformsKeys;
  static constexpr int kColumnWarps = kPairsWarps ? 2 : 1;
  static constexpr int kTokenWarps = kAttentionWarps / kColumnWarps;

  // A thread holds its rows of the output in registers; more than 256 columns are split along the
  // grid, unless two warps share them.
  static constexpr int kNumOutputParts = kHeadDimVO <= 256 || kPairsWarps ? 1 : 2;
  static constexpr int kOutputDim = kHeadDimVO / kNumOutputParts;  // of a CTA
  static constexpr int kWarpDimQK = kHeadDimQK / kColumnWarps;     // columns of a warp
  static constexpr int kWarpDimVO = kOutputDim / kColumnWarps;
  static_assert(kWarpDimQK % 16 == 0 && kWarpDimVO % 16 == 0 && kWarpDimVO <= 256);
  // The products take the columns of v of few bits in another order; see output_column().
  static constexpr int kInterleavedTiles = kKeysAre4Bit ? 4 : kKeysAre8Bit ? 2 : 1;
  static constexpr bool kHidesByMinimum = false, kCapsWeights = false;  // see rows.cuh
  static constexpr int kWarpRows = kTileQ == 128 ? 32 : 16;
  static constexpr int kRowTiles = kWarpRows / 16;  // mma row tiles per warp
  // Tokens that a warp loads.
  static constexpr int kWarpTokens = kNarrow && kKeysAre4Bit ? 32 : 16;
  static constexpr int kRows = kAttentionWarps * kWarpTokens;       // of a stage in shared memory
  static constexpr int kTokens = kTokenWarps * kWarpTokens;         // of a tile
  static constexpr int kWarpKV = kSplitKV ? kWarpTokens : kTokens;  // tokens that a warp multiplies
  // Tiles of logits. A thread holds two tokens of two rows in each; a transposed tile has 16
  // tokens.
  static constexpr int kTokenTiles = kWarpKV / (kNarrow ? 16 : 8);
  static constexpr int kOutputTiles = kWarpDimVO / (kNarrow ? 16 : 8);
  static constexpr int kStepsQK = kWarpDimQK / 16;
  static constexpr bool kQInRegisters = kNarrow || (kRowTiles == 1 && kHeadDimQK <= 128);

  static constexpr int kBits = kKeysAre4Bit ? 4 : 8 * static_cast<int>(sizeof(KV));
  static constexpr int kRowBytesK = kWarpDimQK * kBits / 8, kRowBytesV = kWarpDimVO * kBits / 8;
  using RowsK = SharedRows<kRowBytesK>;
  using RowsV = SharedRows<kRowBytesV>;
  // The rows of K that are multiplied.
  using ProductRowsK = std::conditional_t<kWidensKeys, SharedRows<kWarpDimQK * 2>, RowsK>;
  static constexpr int kScaleBytesK = kKeysAre4Bit ? kWarpDimQK / 16 : 0;  // of a row
  static constexpr int kScaleBytesV = kKeysAre4Bit ? kWarpDimVO / 16 : 0;
  static_assert(kScaleBytesK % 4 == 0 && kScaleBytesV % 4 == 0, "4-bit heads: multiples of 64");
  // padded, since q is copied only once
  static constexpr int kPitchQ = (kHeadDimQK * 2 / 16 | 1) * 16;
  static constexpr int kBytesQ = round_up(kTileQ * kPitchQ, 128);
  static constexpr int kBytesK = kRows * RowsK::kPitch;
  static constexpr int kBytesV = kRows * RowsV::kPitch;
  static constexpr int kBytesBlockScales = kRows * (kScaleBytesK + kScaleBytesV);
  static constexpr int kBytesStage = kBytesK + kBytesV + kBytesBlockScales;
  static constexpr int kBytesScale = kScalesQuery ? round_up(kTileQ * 4, 128) : 0;
  static_assert(kBytesQ % 128 == 0 && kBytesK % 128 == 0 && kBytesV % 128 == 0);
  // Buffer where the warps' outputs are added (kSplitKV); it reuses the K/V stages.
  static constexpr int kPitchExchange = kOutputDim + (kNarrow ? 4 : 0);
  static constexpr int kBytesExchange =
      kSplitKV ? kTokenWarps * kTileQ * (kPitchExchange + 2) * 4 : 0;
  // Parts of the logits that warps which share tokens exchange, of two tiles in turn.
  static constexpr int kBytesLogits = kPairsWarps ? 2 * kAttentionThreads * kTokenTiles * 16 : 0;
  static constexpr int kBytesWideK = kWidensKeys ? kRows * ProductRowsK::kPitch : 0;  // of a tile
  static constexpr int kPlaceOfWideK = kBytesQ + kBytesScale + kBytesLogits;
  static constexpr int kPlaceOfItem = kPlaceOfWideK + kBytesWideK;
  static constexpr int kPlaceOfStages = kPlaceOfItem + (kSplitKV ? 128 : 0);

  // CTAs of an SM that registers leave room for: warps that unpack codes hide each other's waiting.
  static constexpr int kLeastCtas = !kNarrow || !kKeysAre4Bit                ? 0
                                    : kWarpDimVO <= 128 && kWarpDimQK <= 128 ? 4
                                                                             : 3;

  // Decode keeps three tiles in flight. Two CTAs with three stages stream as fast as three CTAs
  // with two, and fewer CTAs split a batch less. Prefill is bound by the products and needs two
  // stages.
  FLASHINFER_HOST_DEVICE static constexpr int num_stages(int cc) {
    constexpr int wanted = kSplitKV && !(kNarrow && kKeysAre4Bit) ? 3 : 2;
    const int fit = (max_shared_bytes(cc) - kPlaceOfStages) / kBytesStage;
    return fit < wanted ? (fit < 1 ? 1 : fit) : wanted;
  }
  FLASHINFER_HOST_DEVICE static constexpr int shared_bytes(int cc) {
    const int stages = num_stages(cc) * kBytesStage;
    const int used = kPlaceOfStages + (stages > kBytesExchange ? stages : kBytesExchange);
    // Decode of an 8-bit cache runs at most two CTAs per SM: long requests would otherwise be split
    // for three.
    constexpr bool kAtMostTwo = kSplitKV && kKeysAre8Bit && kBytesK + kBytesV >= 16 << 10;
    const int third = max_shared_bytes(cc) / 3 + 1;
    return kAtMostTwo && used < third ? third : used;
  }
};

}  // namespace flashinfer
