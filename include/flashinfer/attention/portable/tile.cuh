// Shapes of an attention tile.
//
// A CTA of four warps holds `kTileQ` packed query rows and streams K and V in tiles of 64 tokens.
// kTileQ 8, 16: the warps share the query rows and each takes 16 tokens of every K/V tile (decode).
// kTileQ 64, 128: each warp takes 16 or 32 query rows and all tokens. Either way a warp loads 16
// tokens of each tile.
//
// Products have 16 rows. With 8 query rows (narrow), both are multiplied as their transposes, whose
// rows are tokens and columns of v, and whose 8 columns are the query rows: 16 products instead of
// 32 for 16 tokens of 128 columns, half the exponentials, half the registers.
#pragma once

#include <cstdint>
#include <type_traits>
#include <flashinfer/attention/attention_params.h>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/shared_limit.h>
#include <flashinfer/layout/shared_rows.cuh>

namespace flashinfer {

inline constexpr int kAttentionThreads = 128;
inline constexpr int kAttentionWarps = kAttentionThreads / 32;
inline constexpr int kTileKV = 64;
inline constexpr int kWarpTokens = kTileKV / kAttentionWarps;  // that a warp loads

template <typename Q_, typename KV_, typename O_, int kHeadDimQK_, int kHeadDimVO_, int kTileQ_>
struct TileTraits {
  using Q = Q_;
  using KV = KV_;
  using O = O_;
  static constexpr bool kKeysAre8Bit = dtype::kIsFloat8<KV>;
  // 8-bit K and V are multiplied as float16, which holds all their values.
  using Mma = std::conditional_t<kKeysAre8Bit, dtype::float16, KV>;
  static_assert(kKeysAre8Bit || std::is_same_v<Q, KV>, "16-bit q, k and v are of one type");
  static constexpr bool kScalesQuery = kKeysAre8Bit && !std::is_same_v<Q, dtype::float16>;

  static constexpr int kHeadDimQK = kHeadDimQK_;
  static constexpr int kHeadDimVO = kHeadDimVO_;
  // A thread holds its rows of the output in registers: beyond 256 columns grid z shares them out.
  static constexpr int kOutputDim = kHeadDimVO <= 256 ? kHeadDimVO : kHeadDimVO / 2;
  static constexpr int kNumOutputParts = kHeadDimVO / kOutputDim;
  static_assert(kHeadDimQK % 16 == 0 && kOutputDim % 16 == 0 && kOutputDim <= 256);

  static constexpr int kTileQ = kTileQ_;
  static constexpr bool kSplitKV = kTileQ <= 16;  // between the warps
  static constexpr bool kNarrow = kTileQ == 8;
  // The products take the columns of 8-bit v in another order; see output_column().
  static constexpr bool kInterleavesColumns = kKeysAre8Bit;
  static constexpr bool kHidesByMinimum = false;  // see rows.cuh
  static constexpr int kWarpRows = kTileQ == 128 ? 32 : 16;
  static constexpr int kRowTiles = kWarpRows / 16;                  // of mma, per warp
  static constexpr int kWarpKV = kSplitKV ? kWarpTokens : kTileKV;  // tokens a warp multiplies
  // Of logits, of which a thread has two tokens of two rows each; transposed it is one of 16
  // tokens.
  static constexpr int kTokenTiles = kNarrow ? 1 : kWarpKV / 8;
  static constexpr int kOutputTiles = kOutputDim / (kNarrow ? 16 : 8);
  static constexpr int kStepsQK = kHeadDimQK / 16;
  static constexpr bool kQInRegisters = kNarrow || (kRowTiles == 1 && kHeadDimQK <= 128);

  using RowsK = SharedRows<kHeadDimQK* static_cast<int>(sizeof(KV))>;
  using RowsV = SharedRows<kOutputDim* static_cast<int>(sizeof(KV))>;
  static constexpr int kPitchQ = (kHeadDimQK * 2 / 16 | 1) * 16;  // padded: they come but once
  static constexpr int kBytesQ = kTileQ * kPitchQ;
  static constexpr int kBytesK = kTileKV * RowsK::kPitch;
  static constexpr int kBytesV = kTileKV * RowsV::kPitch;
  static constexpr int kBytesScale = kScalesQuery ? round_up(kTileQ * 4, 128) : 0;
  static_assert(kBytesQ % 128 == 0 && kBytesK % 128 == 0 && kBytesV % 128 == 0);
  // Where the warps' outputs meet (kSplitKV); takes the place of the K/V stages.
  static constexpr int kPitchExchange = kOutputDim + (kNarrow ? 4 : 0);
  static constexpr int kBytesExchange =
      kSplitKV ? kAttentionWarps * kTileQ * (kPitchExchange + 2) * 4 : 0;

  // Decode keeps three tiles in flight. On an H200, bf16 heads of 128, two CTAs with three stages
  // and three CTAs with two stream long batches alike (4.2 TB/s, as does one CTA with two); the
  // fewer CTAs cut less: 64 requests of 1024 tokens took 71.8 instead of 76.1 us, one of 8192 15.1
  // instead of 16.4. Prefill is bound by the products and needs two stages.
  FLASHINFER_HOST_DEVICE static constexpr int num_stages(int cc) {
    constexpr int wanted = kSplitKV ? 3 : 2;
    const int fit = (max_shared_bytes(cc) - kBytesQ - kBytesScale) / (kBytesK + kBytesV);
    return fit < wanted ? (fit < 1 ? 1 : fit) : wanted;
  }
  FLASHINFER_HOST_DEVICE static constexpr int shared_bytes(int cc) {
    const int stages = num_stages(cc) * (kBytesK + kBytesV);
    const int used = kBytesQ + kBytesScale + (stages > kBytesExchange ? stages : kBytesExchange);
    // Decode of 8 bits has no third CTA on a multiprocessor: 64 requests of 8192 tokens are cut for
    // three and not for two, 265 instead of 257 us on an H200; one such request 12.5 instead of 11.
    constexpr bool kAtMostTwo = kSplitKV && kKeysAre8Bit && kBytesK + kBytesV >= 16 << 10;
    const int third = max_shared_bytes(cc) / 3 + 1;
    return kAtMostTwo && used < third ? third : used;
  }
};

}  // namespace flashinfer
