// The widener warpgroup: for 16-bit queries it converts 8-bit K and V to float16, from the tiles as
// loaded to the tiles that the tensor cores read. Float16 represents every 8-bit value, and two
// e4m3 values convert in one instruction, where bfloat16 needs four.
//
// Measurements, also of what lost: docs/tuning/attention_sm90_kv8.md.
#pragma once

#include <flashinfer/common/float8.cuh>
#include <flashinfer/attention/sm90/tile.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/tma.cuh>

namespace flashinfer {

// Each of four warps converts a quarter of a tile's rows, in pieces of eight rows by 64 columns; a
// lane takes 16 columns.
template <typename Tile>
class HopperWidener {
  static constexpr int kRows = Tile::kTileKV / 4;
  template <bool kKeys>
  static constexpr int kChunks = ceil_div(kKeys ? Tile::kHeadDimQK : Tile::kHeadDimVO, 64);

 public:
  __device__ __forceinline__ HopperWidener(char* shared, HopperControl& control)
      : control_(control), lane_idx_(threadIdx.x % 32) {
    // Avoids bank conflicts among eight lanes, four per row: loads of two rows use different banks
    // if bit 2 of the row numbers differs, stores if bit 0 differs.
    const int pair = lane_idx_ / 8, row = lane_idx_ / 4 % 2 == 0 ? pair : pair ^ 5;
    const int column = lane_idx_ % 4;
    const uint32_t rows = ptx::shared_address(shared) + (threadIdx.x / 32 % 4 * kRows + row) * 128;
    source_ = rows + (column ^ row) * 16;
    target_ = rows + (column * 2 ^ row) * 16;
  }

  // Converts the tiles in the order in which they are loaded.
  __device__ __forceinline__ void run() {
    while (true) {
      const auto& slot = control_.work[work_.stage];
      ptx::mbarrier_wait(address(control_.work_full[work_.stage]), work_.phase);
      if (slot.item.request < 0) return;
      const int num_tiles = ceil_div(max(slot.item.kv_end - slot.item.kv_begin, 0), Tile::kTileKV);
      // Rows of the last tile that belong to the request; other tiles are full.
      const int last_rows = slot.item.kv_len - slot.item.kv_begin - (num_tiles - 1) * Tile::kTileKV;
      arrive(control_.work_empty[work_.stage]);
      work_.advance();
      for (int tile = num_tiles - 1; tile >= -1 && num_tiles > 0; --tile) {
        if (tile >= 0) {
          widen<true>(k_ring_, control_.loaded_k_full, control_.loaded_k_empty, control_.k_full,
                      control_.k_empty);
        }
        if (tile < num_tiles - 1) {
          if (tile == num_tiles - 2 && last_rows < Tile::kTileKV) clear_values(last_rows);
          widen<false>(v_ring_, control_.loaded_v_full, control_.loaded_v_empty, control_.v_full,
                       control_.v_empty);
        }
      }
    }
  }

 private:
  template <typename T>
  __device__ __forceinline__ static uint32_t address(T& in_shared) {
    return ptx::shared_address(&in_shared);
  }

  __device__ __forceinline__ void arrive(uint64_t& barrier) const {
    __syncwarp();
    if (lane_idx_ == 0) ptx::mbarrier_arrive(address(barrier));
  }

  struct Rings {
    ptx::Ring<Tile::kLoadedStages> loaded;
    ptx::Ring<Tile::kStages> widened;
  };

  // Clears this lane's pieces of rows after the request's `num_rows` in the next tile of v. They
  // may hold NaN, and 0 * NaN is not 0.
  __device__ __forceinline__ void clear_values(int num_rows) {
    const auto& loaded = v_ring_.loaded;
    ptx::mbarrier_wait(address(control_.loaded_v_full[loaded.stage]), loaded.phase);
    const uint32_t source = source_ + Tile::kOffsetLoadedV + loaded.stage * Tile::kBytesLoadedV;
    const uint32_t shared = ptx::shared_address(&control_) - Tile::kOffsetControl;
    const int first = static_cast<int>((source_ - shared) / 128);  // first of the lane's rows
#pragma unroll 1
    for (int rows = 0; rows < kRows; rows += 8) {
      if (first + rows < num_rows) continue;
#pragma unroll
      for (int chunk = 0; chunk < kChunks<false>; ++chunk) {
        ptx::store_shared_16(
            (chunk % 2 == 0 ? source : source ^ 64) + (chunk / 2 * Tile::kTileKV + rows) * 128,
            uint4{0, 0, 0, 0});
      }
    }
  }

  template <bool kKeys, typename Barriers>
  __device__ __forceinline__ void widen(Rings& rings, Barriers& loaded_full, Barriers& loaded_empty,
                                        Barriers& full, Barriers& empty) {
    constexpr int kPieces = kRows / 8 * kChunks<kKeys>;
    // Pieces in flight. More of them take registers from the producer, which then spills; with one,
    // every load's latency counts.
    constexpr int kAhead = 2;
    static_assert(kPieces >= kAhead);
    const auto& loaded = rings.loaded;
    const uint32_t source =
        source_ + (kKeys ? Tile::kOffsetLoadedK + loaded.stage * Tile::kBytesLoadedK
                         : Tile::kOffsetLoadedV + loaded.stage * Tile::kBytesLoadedV);
    const uint32_t second = source ^ 64;  // the second 64 of the 128 columns in a row
    uint4 pieces[kAhead];
    const auto load = [&](int i) {
      const int rows = i / kChunks<kKeys> * 8, chunk = i % kChunks<kKeys>;
      pieces[i % kAhead] = ptx::load_shared_16((chunk % 2 == 0 ? source : second) +
                                               (chunk / 2 * Tile::kTileKV + rows) * 128);
      if (i < kPieces - 1) return;
      // All loads have reached registers, so the copy engine may overwrite the tile after the
      // fence.
      ptx::async_proxy_fence();
      arrive(loaded_empty[loaded.stage]);
      rings.loaded.advance();
    };
    ptx::mbarrier_wait(address(loaded_full[loaded.stage]), loaded.phase);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i);

    const auto& widened = rings.widened;
    const uint32_t target = target_ + (kKeys ? Tile::kOffsetK + widened.stage * Tile::kBytesK
                                             : Tile::kOffsetV + widened.stage * Tile::kBytesV);
    const uint32_t next = target ^ 16;
    ptx::mbarrier_wait(address(empty[widened.stage]), widened.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int rows = i / kChunks<kKeys> * 8, chunk = i % kChunks<kKeys>;
      const uint32_t offset = (chunk * Tile::kTileKV + rows) * 128;
      store(pieces[i % kAhead], target + offset, next + offset);
      if (i + kAhead < kPieces) load(i + kAhead);
    }
    ptx::async_proxy_fence();
    arrive(full[widened.stage]);
    rings.widened.advance();
  }

  __device__ __forceinline__ static void store(const uint4& piece, uint32_t target, uint32_t next) {
    using Float8 = typename Tile::KV;
    uint4 low, high;
    float8_to_half2<Float8>(piece.x, low.x, low.y);
    float8_to_half2<Float8>(piece.y, low.z, low.w);
    float8_to_half2<Float8>(piece.z, high.x, high.y);
    float8_to_half2<Float8>(piece.w, high.z, high.w);
    ptx::store_shared_16(target, low);
    ptx::store_shared_16(next, high);
  }

  HopperControl& control_;
  const int lane_idx_;
  uint32_t source_, target_;  // this lane's first 16 bytes of a tile, without the stage's offset
  ptx::Ring<HopperControl::kWorkStages> work_;
  Rings k_ring_, v_ring_;
};

}  // namespace flashinfer
