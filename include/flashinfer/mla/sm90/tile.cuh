// Shared memory of the MLA kernel for Hopper (mla/sm90/mla.cuh).
//
// Operands lie as the tensor cores read them: chunks of 64 columns, in each 64 rows of 128 bytes
// with the 128-byte swizzle. One copy of queries, two blocks of KV and the weights of one block
// fill the CTA's shared memory; values are the first chunks of the keys.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/scheduler/mla_work.h>
#include <type_traits>

namespace flashinfer {

// T is what the tensor cores multiply; queries, latent rows and rotary rows may lie in other types
// in memory.
template <typename T_, typename O_, int kDimCkv_, int kDimKpe_, typename Q_ = T_,
          typename Ckv_ = T_, typename Kpe_ = T_, bool kScaled_ = false>
struct MlaTile {
  using T = T_;
  using O = O_;
  using Q = Q_;
  using Ckv = Ckv_;
  using Kpe = Kpe_;
  static constexpr bool kWidens = sizeof(Ckv) == 1;
  static constexpr bool kProfiled = false;
  // After a latent row lies a float32 for each 128 columns, its scale.
  static constexpr bool kScaled = kScaled_;
  static_assert(!kScaled || (kWidens && kDimCkv_ == 512));
  // Whether two CTAs with the same KV rows share the work of bringing them. Without scales it takes
  // longer to store rows of 8 bits in the other CTA than to widen them.
  static constexpr bool kPairs = kScaled || !kWidens;
  // Whether the copy engine brings queries, whose chunks then come with those of the item's first
  // block: a pair's tiles are whole, 64 heads of a token.
  template <int kSharers>
  static constexpr bool kQueriesAreBoxes = kSharers == 2 && !kWidens;
  // Whether rows of parts have their columns as products leave them (part_rows.cuh).
  static constexpr bool kPartsAsHeld = !kWidens;
  static_assert(kWidens || (std::is_same_v<Q, T> && std::is_same_v<Ckv, T>));
  static_assert(sizeof(T) == 2);
  static constexpr int kDimCkv = kDimCkv_, kDimKpe = kDimKpe_;
  static_assert((kDimCkv == 512 || kDimCkv == 256) && (kDimKpe == 64 || kDimKpe == 0));
  static constexpr int kRows = 64;   // packed query rows of a tile
  static constexpr int kBlock = 64;  // KV tokens of a block
  static constexpr int kStep = 2 * kBlock;
  static constexpr int kChunksCkv = kDimCkv / 64;
  static constexpr int kChunksHalf = kChunksCkv / 2;  // of the output columns of a warpgroup
  static constexpr int kChunks = kChunksCkv + (kDimKpe != 0 ? 1 : 0);  // the last one: kpe
  // Whether kpe is given back on its own, after the block's logits, and comes before the halves.
  static constexpr bool kRopeFirst = !kWidens && kDimKpe != 0;
  static constexpr int kChunkBytes = 64 * 128;
  // Eight rows of a chunk of KV are 1 KiB. Next to them lie the next eight rows, or, in halves that
  // come from another CTA, the same rows of the next chunk.
  static constexpr int kGroupBytes = kScaled ? 1024 * kChunksHalf : 1024;
  static constexpr int kColumnBytes = kScaled ? 1024 : kChunkBytes;
  // Where a chunk begins in a block, and the distance between groups of eight rows of it.
  __host__ __device__ static constexpr int chunk_offset(int chunk) {
    return chunk / kChunksHalf * kChunksHalf * kChunkBytes + chunk % kChunksHalf * kColumnBytes;
  }
  __host__ __device__ static constexpr int group_bytes(int chunk) {
    return chunk == kChunksCkv ? 1024 : kGroupBytes;
  }
  // Where the 16 bytes of columns `unit` of a row lie.
  __device__ static int offset(int row, int unit) {
    return chunk_offset(unit / 8) + row / 8 * group_bytes(unit / 8) + row % 8 * 128 +
           (unit ^ row) % 8 * 16;
  }
  // Neighbouring chunks that come together, and have one barrier.
  static constexpr int kChunksTogether = kScaled ? 2 : 1;
  static constexpr int kOutputTiles = kDimCkv / 2 / 8;

  // Rows with scales take longer to widen: two warpgroups do it.
  static constexpr int kLoadWarps = kScaled ? 8 : 4;
  static constexpr int kConsumerThreads = 256, kThreads = kConsumerThreads + 32 * kLoadWarps;
  static constexpr int kProducerRegisters = kScaled ? 48 : kWidens ? 88 : kDimCkv == 512 ? 56 : 72;
  static constexpr int kConsumerRegisters = kWidens ? 208 : kDimCkv == 512 ? 224 : 216;
  // A launch has as many for each thread. Asking for more waits for ever.
  static constexpr int kThreadRegisters = kThreads == 512 ? 128 : 168;
  static_assert(kProducerRegisters * 32 * kLoadWarps + kConsumerRegisters * kConsumerThreads ==
                kThreadRegisters * kThreads);

  static constexpr int kOffsetQ = 0;
  static constexpr int kOffsetK = kChunks * kChunkBytes;  // of block 0
  static constexpr int kBlockBytes = kChunks * kChunkBytes;
  static constexpr int kOffsetWeights = 3 * kChunks * kChunkBytes;
  static constexpr int kOffsetControl = kOffsetWeights + kChunkBytes;
};

// The same for a kernel that records its events (mla/events.cuh).
template <typename Tile>
struct MlaProfiledTile : Tile {
  static constexpr bool kProfiled = true;
};

// Who writes events in a CTA: each warpgroup has a group of its own.
inline constexpr uint32_t kMlaProfileGroups = 3;

inline constexpr int kMlaCopyWarp = 8;  // the first of those that load

// Parts of a block: the columns of the first and the second warpgroup, kpe.
enum MlaPart { kLeft, kRight, kRope, kNumParts };
inline constexpr int kMlaMaxChunks = 9;

struct MlaControl {
  uint64_t q_full, q_empty;
  uint64_t kv_full[2][kMlaMaxChunks];  // each chunk has a barrier, so that products begin early
  uint64_t kv_empty[2][kNumParts];     // without kRopeFirst, kpe is free when both halves are
  float largest[2][64];                // of rows, as the first and the second block left them
  float sums[2][2][64];                // by parity of the item, of either warpgroup
  float row_scale[64];                 // of logits, where queries were widened
  uint32_t share_index, share_count;   // of the rows to merge
  int waited_for;                      // the merge whose parts the CTA has waited for, or -1
  int complete_merge;                  // that an earlier item completed, or -1
  MlaMerge last_merge;                 // of the part that the CTA's last item is
};

template <typename Tile>
inline constexpr int kMlaSharedBytes = Tile::kOffsetControl + static_cast<int>(sizeof(MlaControl));

// Barriers among warps; 0 is __syncthreads. The last is one of each warpgroup.
enum MlaBarrier {
  kWeightsOfFirst = 1,
  kWeightsOfSecond,
  kItemEnd,
  kItemWritten,
  kTurn,
  kPartsSeen,
  kGroupBarrier
};

}  // namespace flashinfer
