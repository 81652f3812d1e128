// The two products of an attention tile, computed by a warp: q k^T and p v.
#pragma once

#include <flashinfer/common/float8.cuh>
#include <flashinfer/attention/portable/block_scales.cuh>
#include <flashinfer/attention/portable/tile.cuh>
#include <flashinfer/attention/state.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/mma.cuh>

namespace flashinfer {

// The query rows as A fragments, if a warp keeps them in registers. Narrow tiles hold B fragments,
// two steps together.
template <typename Tile>
struct QueryFragments {
  static constexpr int kSteps = Tile::kQInRegisters ? Tile::kStepsQK : 1;
  uint32_t registers[Tile::kNarrow ? ceil_div(kSteps, 2) : kSteps][4];

  __device__ __forceinline__ void load(uint32_t shared_q) {
    const int lane_idx = threadIdx.x % 32;
    if constexpr (Tile::kNarrow) {
      const uint32_t address = shared_q + lane_idx % Tile::kTileQ * Tile::kPitchQ;
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        const int column = step + 1 < kSteps ? lane_idx / 8 : lane_idx / 8 % 2;
        ptx::ldmatrix_x4(registers[step / 2], address + step * 32 + column * 16);
      }
    } else {
      const uint32_t address = shared_q + lane_idx % 16 * Tile::kPitchQ + lane_idx / 16 * 16;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        ptx::ldmatrix_x4(registers[step], address + step * 32);
    }
  }

  __device__ __forceinline__ uint32_t get(int step, int r) const { return registers[step][r]; }
  __device__ __forceinline__ uint32_t get_narrow(int step, int r) const {
    return registers[step / 2][step % 2 * 2 + r];
  }
};

// Computes k q^T for narrow tiles: logits of the warp's rows and of tokens 16 * token_step ... + 15
// at `shared_k`. A thread gets two tokens of its first row, then of its second row; the tokens are
// lane / 4 and lane / 4 + 8. `scales`: of the 4-bit rows at `shared_k`, here and below.
template <typename Tile>
__device__ __forceinline__ void multiply_kq(float (&logits)[4], const QueryFragments<Tile>& query,
                                            uint32_t shared_k, int token_step, const char* scales) {
  using RowsK = typename Tile::ProductRowsK;
  const int lane_idx = threadIdx.x % 32, first = token_step * 16;
  // Even and odd steps have separate sums, which halves the chain of dependent products.
  float sums[2][4] = {};
  const auto multiply = [&](int step, const uint32_t (&a)[4]) {
    ptx::mma_m16n8k16<typename Tile::Mma>(sums[step % 2], a, query.get_narrow(step, 0),
                                          query.get_narrow(step, 1));
  };
  const auto lane_k = [&](bool has_columns) {
    return shared_k + RowsK::offset(lane_idx % 16, has_columns ? lane_idx / 16 * 16 : 0);
  };
  if constexpr (Tile::kMultipliesKeysOf8Bits) {
#pragma unroll
    for (int step = 0; step < Tile::kStepsQK; step += 2) {
      const bool has_second = step + 1 < Tile::kStepsQK;
      uint32_t bytes[4];
      ptx::ldmatrix_x4(bytes, RowsK::move(lane_k(has_second), first, step * 16));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if (s == 1 && !has_second) continue;
        uint32_t a[4];
        float8_keys<typename Tile::KV>(bytes[2 * s], a[0], a[2]);
        float8_keys<typename Tile::KV>(bytes[2 * s + 1], a[1], a[3]);
        multiply(step + s, a);
      }
    }
  } else if constexpr (Tile::kKeysAre4Bit) {
    const KeyScales<Tile> rows{scales + (first + lane_idx / 4) * Tile::kScaleBytesK};
#pragma unroll
    for (int step = 0; step < Tile::kStepsQK; step += 4) {
      const uint32_t factors[2] = {rows.get(0, step / 4), rows.get(8, step / 4)};
      uint32_t codes[4];
      ptx::ldmatrix_x4(codes, RowsK::move(lane_k(true), first, step * 8));
      const auto multiply_block = [&](auto index) {
        constexpr int s = decltype(index)::value;
        uint32_t first[4], second[4];  // pairs of columns of a token, and of the one 8 further on
        float4_keys<s>(codes[2 * s], factors[0], first);
        float4_keys<s>(codes[2 * s + 1], factors[1], second);
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
          const uint32_t a[4] = {first[p], second[p], first[p + 1], second[p + 1]};
          multiply(step + 2 * s + p / 2, a);
        }
      };
      multiply_block(std::integral_constant<int, 0>());
      multiply_block(std::integral_constant<int, 1>());
    }
  } else {
#pragma unroll
    for (int step = 0; step < Tile::kStepsQK; ++step) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, RowsK::move(lane_k(true), first, step * 32));
      multiply(step, a);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) logits[e % 2 * 2 + e / 2] = sums[0][e] + sums[1][e];
}

// Computes logits = q k^T for tiles with more rows, for the warp's first kTokens tokens; other
// logits are 0.
template <typename Tile, int kTokens>
__device__ __forceinline__ void multiply_qk(float (&logits)[Tile::kRowTiles][Tile::kTokenTiles][4],
                                            uint32_t shared_q, const QueryFragments<Tile>& query,
                                            uint32_t shared_k, const char* scales) {
  using Mma = typename Tile::Mma;
  using RowsK = typename Tile::ProductRowsK;
  const int lane_idx = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; ++j) {
      logits[i][j][0] = logits[i][j][1] = logits[i][j][2] = logits[i][j][3] = 0.f;
    }
  }
  // With few tokens, even and odd steps have separate sums, which halves the chain of dependent
  // products.
  constexpr bool kSplitSums = Tile::kSplitKV && Tile::kConvertsKeys;
  float odd[Tile::kRowTiles][Tile::kTokenTiles][4] = {};
  const uint32_t lane_q = shared_q + lane_idx % 16 * Tile::kPitchQ + lane_idx / 16 * 16;
  const auto load_query = [&](uint32_t (&a)[Tile::kRowTiles][4], int step) {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
      if constexpr (Tile::kQInRegisters) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a[i][r] = query.get(step, r);
      } else {
        ptx::ldmatrix_x4(a[i], lane_q + i * 16 * Tile::kPitchQ + step * 32);
      }
    }
  };
  if constexpr (Tile::kMultipliesKeysOf8Bits) {
    // A matrix of 8 tokens by 16 bytes is a whole step for 8 tokens. One load covers two steps; the
    // last of an odd number of steps is loaded twice.
    const auto lane_k = [&](bool has_second) {
      return shared_k + RowsK::offset(lane_idx % 16, has_second ? lane_idx / 16 * 16 : 0);
    };
#pragma unroll
    for (int step = 0; step < Tile::kStepsQK; step += 2) {
      const bool has_second = step + 1 < Tile::kStepsQK;
      uint32_t a[2][Tile::kRowTiles][4];
      load_query(a[0], step);
      if (has_second) load_query(a[1], step + 1);
#pragma unroll
      for (int j = 0; j < kTokens / 8; j += 2) {
        uint32_t bytes[4];
        ptx::ldmatrix_x4(bytes, RowsK::move(lane_k(has_second), j * 8, step * 16));
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          if (s == 1 && !has_second) continue;
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            uint32_t b0, b1;
            float8_keys<typename Tile::KV>(bytes[2 * s + t], b0, b1);
#pragma unroll
            for (int i = 0; i < Tile::kRowTiles; ++i) {
              ptx::mma_m16n8k16<Mma>(kSplitSums && s ? odd[i][j + t] : logits[i][j + t], a[s][i],
                                     b0, b1);
            }
          }
        }
      }
    }
  } else if constexpr (Tile::kKeysAre4Bit) {
    // A matrix of 8 tokens by 16 bytes is two steps for 8 tokens. One load covers four steps.
    const uint32_t lane_k = shared_k + RowsK::offset(lane_idx % 16, lane_idx / 16 * 16);
    const KeyScales<Tile> rows{scales + lane_idx / 4 * Tile::kScaleBytesK};
#pragma unroll
    for (int step = 0; step < Tile::kStepsQK; step += 4) {
      uint32_t a[4][Tile::kRowTiles][4];
#pragma unroll
      for (int s = 0; s < 4; ++s) load_query(a[s], step + s);
#pragma unroll
      for (int j = 0; j < kTokens / 8; j += 2) {
        uint32_t codes[4];
        ptx::ldmatrix_x4(codes, RowsK::move(lane_k, j * 8, step * 8));
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const uint32_t factors = rows.get((j + t) * 8, step / 4);
          uint32_t b[2][4];
          float4_keys<0>(codes[t], factors, b[0]);
          float4_keys<1>(codes[2 + t], factors, b[1]);
#pragma unroll
          for (int s = 0; s < 4; ++s) {
#pragma unroll
            for (int i = 0; i < Tile::kRowTiles; ++i) {
              ptx::mma_m16n8k16<Mma>(kSplitSums && s % 2 ? odd[i][j + t] : logits[i][j + t],
                                     a[s][i], b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]);
            }
          }
        }
      }
    }
  } else {
    const uint32_t lane_k =
        shared_k + RowsK::offset(lane_idx % 8 + lane_idx / 16 * 8, lane_idx / 8 % 2 * 16);
#pragma unroll
    for (int step = 0; step < Tile::kStepsQK; ++step) {
      uint32_t a[Tile::kRowTiles][4];
      load_query(a, step);
#pragma unroll
      for (int j = 0; j < kTokens / 8; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, RowsK::move(lane_k, j * 8, step * 32));
#pragma unroll
        for (int i = 0; i < Tile::kRowTiles; ++i) {
          auto& sums = kSplitSums && step % 2 ? odd : logits;
          ptx::mma_m16n8k16<Mma>(sums[i][j], a[i], b[0], b[1]);
          ptx::mma_m16n8k16<Mma>(sums[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  if constexpr (kSplitSums) {
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) logits[0][j][e] += odd[0][j][e];
    }
  }
}

// output += p v for tokens 16 * token_step ... + 15 at `shared_v`; `p` holds their weights as the A
// fragments of the row tiles.
template <typename Tile>
__device__ __forceinline__ void multiply_pv(WarpState<Tile>& state,
                                            const uint32_t (&p)[Tile::kRowTiles][4],
                                            uint32_t shared_v, int token_step, const char* scales) {
  using Mma = typename Tile::Mma;
  using RowsV = typename Tile::RowsV;
  constexpr int kColumnTiles = Tile::kWarpDimVO / 8;
  const int lane_idx = threadIdx.x % 32;
  const auto lane_v = [&](bool has_second) {
    return shared_v + RowsV::offset(lane_idx % 16, has_second ? lane_idx / 16 * 16 : 0);
  };
  // 16 bytes hold 16 columns of 8-bit values, or 8 columns of 16-bit values; lanes 16-31 address
  // the next 16 bytes.
  if constexpr (Tile::kKeysAre8Bit) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 4) {
      const bool has_second = j + 2 < kColumnTiles;
      uint32_t bytes[4];
      ptx::ldmatrix_x4_trans(bytes, RowsV::move(lane_v(has_second), token_step * 16, j / 2 * 16));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if (s == 1 && !has_second) continue;
        uint32_t even[2], odd[2];
        float8_values<typename Tile::KV>(bytes[2 * s], even[0], odd[0]);
        float8_values<typename Tile::KV>(bytes[2 * s + 1], even[1], odd[1]);
        if constexpr (Tile::kNarrow) {
          const uint32_t columns[4] = {even[0], odd[0], even[1], odd[1]};
          ptx::mma_m16n8k16<Mma>(state.output[0][j / 2 + s], columns, p[0][0], p[0][1]);
        } else {
#pragma unroll
          for (int i = 0; i < Tile::kRowTiles; ++i) {
            ptx::mma_m16n8k16<Mma>(state.output[i][j + 2 * s], p[i], even[0], even[1]);
            ptx::mma_m16n8k16<Mma>(state.output[i][j + 2 * s + 1], p[i], odd[0], odd[1]);
          }
        }
      }
    }
  } else if constexpr (Tile::kKeysAre4Bit) {
    // 16 bytes hold 32 columns; a load covers 64.
    const ValueScales<Tile> rows{scales + token_step * 16 * Tile::kScaleBytesV};
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 8) {
      uint32_t codes[4], factors[2][2];
      ptx::ldmatrix_x4_trans(codes, RowsV::move(lane_v(true), token_step * 16, j * 4));
      rows.get(0, j / 8, factors[0]);
      rows.get(8, j / 8, factors[1]);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t first[4], second[4];  // of the first and the second eight tokens
        if constexpr (Tile::kDoublesRows) {
          // A lane's weights are those of one copy of a row, for the half of the columns to which
          // its scales belong: two products instead of eight.
          e2m1_to_pairs<Mma>(codes[2 * s], first);
          e2m1_to_pairs<Mma>(codes[2 * s + 1], second);
          const uint32_t weights[2] = {ptx::multiply_pair(p[0][0], factors[0][s]),
                                       ptx::multiply_pair(p[0][1], factors[1][s])};
#pragma unroll
          for (int c = 0; c < 4; c += 2) {
            const uint32_t columns[4] = {first[c], first[c + 1], second[c], second[c + 1]};
            ptx::mma_m16n8k16<Mma>(state.output[0][j / 2 + 2 * s + c / 2], columns, weights[0],
                                   weights[1]);
          }
          continue;
        }
        float4_values(codes[2 * s], factors[0][s], first);
        float4_values(codes[2 * s + 1], factors[1][s], second);
        if constexpr (Tile::kNarrow) {
#pragma unroll
          for (int c = 0; c < 4; c += 2) {
            const uint32_t columns[4] = {first[c], first[c + 1], second[c], second[c + 1]};
            ptx::mma_m16n8k16<Mma>(state.output[0][j / 2 + 2 * s + c / 2], columns, p[0][0],
                                   p[0][1]);
          }
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
#pragma unroll
            for (int i = 0; i < Tile::kRowTiles; ++i) {
              ptx::mma_m16n8k16<Mma>(state.output[i][j + 4 * s + c], p[i], first[c], second[c]);
            }
          }
        }
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      if constexpr (Tile::kNarrow) {
        const uint32_t lane_a =
            shared_v + RowsV::offset(lane_idx % 8 + lane_idx / 16 * 8, lane_idx / 8 % 2 * 16);
        uint32_t a[4];
        ptx::ldmatrix_x4_trans(a, RowsV::move(lane_a, token_step * 16, j * 16));
        ptx::mma_m16n8k16<Mma>(state.output[0][j / 2], a, p[0][0], p[0][1]);
      } else {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, RowsV::move(lane_v(true), token_step * 16, j * 16));
#pragma unroll
        for (int i = 0; i < Tile::kRowTiles; ++i) {
          ptx::mma_m16n8k16<Mma>(state.output[i][j], p[i], b[0], b[1]);
          ptx::mma_m16n8k16<Mma>(state.output[i][j + 1], p[i], b[2], b[3]);
        }
      }
    }
  }
}

}  // namespace flashinfer
