// Shared memory of the portable MLA kernel (mla/portable/mla.cuh): queries, a ring of tiles of KV
// whose first columns are the values, weights, and what the warps of a row tell each other.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/layout/shared_rows.cuh>
#include <flashinfer/scheduler/mla_work.h>

namespace flashinfer {

// kMaxBytes: shared memory that a CTA may have. It decides how many tokens a tile of KV has, and
// how many tiles the ring.
template <typename T_, typename O_, int kDimCkv_, int kDimKpe_, int kMaxBytes,
          bool kProfiled_ = false>
struct MlaPortableTile {
  using T = T_;
  using O = O_;
  static_assert(sizeof(T) == 2);
  static constexpr bool kProfiled = kProfiled_;  // records its events (mla/events.cuh)
  static constexpr int kDimCkv = kDimCkv_, kDimKpe = kDimKpe_, kDim = kDimCkv + kDimKpe;
  static constexpr int kRows = kMlaTileRows;
  static_assert(kDim % 64 == 0);
  static constexpr int kTokens = kMaxBytes >= 227 << 10 ? 64 : kMaxBytes >= 163 << 10 ? 32 : 16;
  static constexpr int kStages = kMaxBytes >= 163 << 10 ? 2 : 1;
  static constexpr int kThreads = 256;
  static constexpr int kTeamWarps = 4, kTeamThreads = 32 * kTeamWarps, kTeamRows = 32;
  static_assert(kThreads / kTeamThreads * kTeamRows == kRows);
  static constexpr int kLogitTiles = kTokens / 2 / 8;            // of a warp: half of the tokens
  static constexpr int kOutputTiles = kDimCkv / kTeamWarps / 8;  // of a warp: its columns

  using Row = SharedRows<kDim * 2>;  // of queries and of KV
  using WeightRow = SharedRows<kTokens * 2>;
  static_assert(kTeamRows * WeightRow::kPitch >= kTeamThreads * kLogitTiles * 8);  // `exchange`
  static constexpr int kStageBytes = kTokens * Row::kPitch;
  static constexpr int kOffsetKv = kRows * Row::kPitch;
  static constexpr int kOffsetWeights = kOffsetKv + kStages * kStageBytes;
  static constexpr int kOffsetShared = kOffsetWeights + kRows * WeightRow::kPitch;
  static constexpr int kSharedBytes = kOffsetShared + 2 * kRows * 4;
  static_assert(kSharedBytes <= kMaxBytes);
};

}  // namespace flashinfer
