// Shapes and shared memory of the scores for Hopper (mqa_logits.cuh).
//
// The tensor cores multiply 64 keys (rows of the left operand) by kQueries queries of all heads
// (the right one). Rows are 128 bytes with the 128-byte swizzle.
#pragma once

#include <cstdint>
#include <flashinfer/common/math.cuh>
#include <flashinfer/indexer/mqa_logits_params.h>

namespace flashinfer {

template <typename Out_, int kHeads_, int kQueries_, bool kPaged_>
struct MqaTile {
  using Out = Out_;
  static constexpr int kHeads = kHeads_, kQueries = kQueries_;
  static constexpr bool kPaged = kPaged_;
  static constexpr int kColumns = kHeads * kQueries;  // of a product
  static constexpr int kTiles = kColumns / 8;
  static_assert(kHeads % 8 == 0 && kColumns <= 128);

  // Each warpgroup that multiplies is fed by a warp of its own: 64 keys of every unit.
  static constexpr int kPairs = 4, kKeys = kMqaUnit / kPairs;
  static_assert(kKeys == 64);
  static constexpr int kStages = 4;  // per pair
  static constexpr int kQueryBuffers = 2;
  static constexpr int kThreads = kPairs * (128 + 32);
  static constexpr int kProducerRegisters = 64, kConsumerRegisters = 104;  // of 96 at the start

  static constexpr int kStageBytes = kKeys * 128, kScaleBytes = kKeys * 4;
  static constexpr int kOffsetScales = kPairs * kStages * kStageBytes;
  static constexpr int kOffsetControl = kOffsetScales + kPairs * kStages * kScaleBytes;
  static constexpr int kOffsetQueries = kOffsetControl + 1024;

  // A query buffer: rows, weights, and the range of positions that each query sees.
  __host__ __device__ static constexpr int query_bytes(int groups) {
    return groups * kColumns * 128;
  }
  __host__ __device__ static constexpr int extra_bytes(int groups) {
    return groups * (kColumns * 4 + round_up(kQueries * 8, 16));
  }
  __host__ __device__ static constexpr int shared_bytes(int groups) {
    return kOffsetQueries + kQueryBuffers * (query_bytes(groups) + extra_bytes(groups));
  }
};

struct MqaControl {
  uint64_t full[4][4], empty[4][4];  // [pair][stage]
  uint64_t query_full[2], query_empty[2];
};
static_assert(sizeof(MqaControl) <= 1024);

// Where things lie, as addresses of shared memory.
template <typename Tile>
struct MqaShared {
  char* base;
  uint32_t address;
  int groups;

  __device__ __forceinline__ MqaControl& control() const {
    return *reinterpret_cast<MqaControl*>(base + Tile::kOffsetControl);
  }
  __device__ __forceinline__ static uint32_t stage(int pair, int i) {
    return static_cast<uint32_t>(pair * Tile::kStages + i);
  }
  __device__ __forceinline__ uint32_t keys(int pair, int i) const {
    return address + stage(pair, i) * Tile::kStageBytes;
  }
  __device__ __forceinline__ uint32_t scales_offset(int pair, int i) const {
    return Tile::kOffsetScales + stage(pair, i) * Tile::kScaleBytes;
  }
  __device__ __forceinline__ uint32_t queries(int buffer) const {
    return address + Tile::kOffsetQueries + buffer * Tile::query_bytes(groups);
  }
  __device__ __forceinline__ uint32_t weights_offset(int buffer) const {
    return Tile::kOffsetQueries + Tile::kQueryBuffers * Tile::query_bytes(groups) +
           buffer * Tile::extra_bytes(groups);
  }
  __device__ __forceinline__ const float* weights(int buffer) const {
    return reinterpret_cast<const float*>(base + weights_offset(buffer));
  }
  __device__ __forceinline__ int2* ranges(int buffer) const {
    return reinterpret_cast<int2*>(base + weights_offset(buffer) + groups * Tile::kColumns * 4);
  }
};

}  // namespace flashinfer
