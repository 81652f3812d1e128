// The two warpgroup products of a consumer, q k^T and p v, and the descriptors of their operands.
#pragma once

#include <flashinfer/attention/sm90/tile.cuh>
#include <flashinfer/attention/state.cuh>
#include <flashinfer/ptx/wgmma.cuh>

// A condition for a branch between two forms of the products of `Tile`, the same in all lanes. If
// they have few columns, ptxas finds registers for them (C7511) with NVRTC only if a vote says so:
// its addresses of shared memory have 64 bits. nvcc's code must stay as it is: a vote, or a
// function around the condition, makes its products wait for each other.
#ifdef __CUDACC_RTC__
#define FLASHINFER_AGREED(Tile, condition) \
  (Tile::kHeadDimVO < 128 ? __any_sync(0xffffffffu, condition) != 0 : (condition))
#else
#define FLASHINFER_AGREED(Tile, condition) (condition)
#endif

namespace flashinfer {

template <typename Traits>
struct HopperProducts {
  using Tile = typename Traits::Tile;
  using Mma = typename Tile::Mma;
  using Key = typename Tile::Key;
  using KeyRows = HopperRows<Traits, Tile::kHeadDimQK>;
  using ValueRows = HopperRows<Traits, Tile::kHeadDimVO>;
  static constexpr int kSteps = Tile::kTileKV / Tile::kStepTokens;
  using Weights = uint32_t[kSteps][1][4];

  // Returns the descriptor of an operand that begins `offset` units after `shared`.
  __device__ __forceinline__ static uint64_t operand(uint32_t shared, uint32_t offset,
                                                     uint32_t chunk_stride = 0,
                                                     uint32_t group_stride = 1024) {
    const uint64_t described = ptx::wgmma_operand(shared + offset, chunk_stride, group_stride);
    return (described >> 32 << 32) | shuffled(static_cast<uint32_t>(described));
  }
  __device__ __forceinline__ static uint64_t eight_bit_operand(uint32_t shared, uint32_t offset) {
    return (ptx::wgmma_operand(0) >> 32 << 32) | (offset + shared / 16);
  }
  static constexpr uint32_t kUnit = Tile::kProductsAre8Bit ? 16 : 1;  // bytes per unit of an offset
  __device__ __forceinline__ static uint32_t key_offset(uint32_t stage) {
    return stage * (Tile::kBytesK / kUnit) + Tile::kOffsetK / kUnit;
  }
  __device__ __forceinline__ static uint32_t value_offset(uint32_t stage) {
    return stage * (Tile::kBytesV / kUnit) + Tile::kOffsetV / kUnit;
  }
  __device__ __forceinline__ static uint32_t shuffled(uint32_t value) {
    return __shfl_sync(0xffffffffu, value, 0);
  }

  // Computes logits = q k^T for the group's rows and the first `kTiles` token tiles.
  template <int kTiles>
  __device__ __forceinline__ static void multiply_qk(float (&all_logits)[Tile::kTokenTiles][4],
                                                     uint64_t q, uint64_t k) {
    auto& logits = reinterpret_cast<float (&)[kTiles][4]>(all_logits);
#pragma unroll
    for (int step = 0; step < Tile::kHeadDimQK * Tile::kElement / 32; ++step) {
      const int chunk = step / 4, within = step % 4 * 32;
      ptx::wgmma<Mma, false, Key>(
          logits, ptx::wgmma_advance(q, chunk * Tile::kTileQ * 128 + within),
          ptx::wgmma_advance(k, chunk * KeyRows::kChunkBytes + within), step > 0);
    }
  }

  // output += p v
  __device__ __forceinline__ static void multiply_pv(WarpState<Tile>& state, const Weights& p,
                                                     uint64_t v) {
    // Columns per instruction.
    constexpr int kPart = Tile::kHeadDimVO < 128 ? Tile::kHeadDimVO : 128;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < Tile::kHeadDimVO / kPart; ++part) {
        auto& sums = reinterpret_cast<float (&)[kPart / 8][4]>(state.output[0][part * kPart / 8]);
        const int offset =
            Tile::kTransposesV
                ? step / 4 * Tile::kHeadDimVO * 128 + part * kPart * 128 + step % 4 * 32
                : part * 2 * ValueRows::kChunkBytes + step * 2 * ValueRows::kGroupBytes;
        ptx::wgmma<typename Tile::Weight, !Tile::kTransposesV, Key>(
            sums, p[step][0], ptx::wgmma_advance(v, offset), true);
      }
    }
  }
};

// Descriptors of the operands at stages of their rings. The shuffle keeps them in uniform
// registers; computed in vector registers they delay each product. With 8-bit products they are
// computed without a mask and from one shuffled stage, since the warp's chain of instructions
// limits a tile's time. With 16-bit products ptxas lacks registers for that (C7511).
template <typename Traits>
struct HopperOperands {
  using Tile = typename Traits::Tile;
  using Products = HopperProducts<Traits>;
  using KeyRows = typename Products::KeyRows;
  using ValueRows = typename Products::ValueRows;
  struct Both {
    uint64_t q, k, v;
  };

  uint32_t shared;  // address
  uint32_t query_stage;
  int group_idx;

  // The operands of a step are the next keys and the values of the tile before.
  __device__ __forceinline__ Both both(uint32_t key_stage, uint32_t value_stage) const {
    if constexpr (Tile::kProductsAre8Bit) {
      const uint32_t stage = Products::shuffled(key_stage);
      const uint32_t before = stage == 0 ? Tile::kStages - 1 : stage - 1;
      const uint64_t q = query();
      return {q, Products::eight_bit_operand(shared, Products::key_offset(stage)),
              Products::eight_bit_operand(shared, Products::value_offset(before))};
    }
    return {query(), keys(key_stage), values(value_stage)};
  }

  __device__ __forceinline__ uint64_t query() const {
    constexpr uint32_t kUnit = Products::kUnit;
    const uint32_t offset = query_stage * (Tile::kBytesQ / kUnit) + group_idx * (64 * 128 / kUnit);
    if constexpr (Tile::kProductsAre8Bit) {
      const uint64_t described = Products::eight_bit_operand(shared, offset);
      return (described >> 32 << 32) | Products::shuffled(static_cast<uint32_t>(described));
    }
    return Products::operand(shared, offset);
  }

  __device__ __forceinline__ uint64_t keys(uint32_t stage) const {
    if constexpr (Tile::kProductsAre8Bit) {
      return Products::eight_bit_operand(shared, Products::key_offset(Products::shuffled(stage)));
    }
    return Products::operand(shared, Products::key_offset(stage), 0, KeyRows::kGroupBytes);
  }

  __device__ __forceinline__ uint64_t values(uint32_t stage) const {
    if constexpr (Tile::kProductsAre8Bit) {
      return Products::eight_bit_operand(shared, Products::value_offset(Products::shuffled(stage)));
    }
    return Products::operand(shared, Products::value_offset(stage), ValueRows::kChunkBytes,
                             ValueRows::kGroupBytes);
  }
};

}  // namespace flashinfer
