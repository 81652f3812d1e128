// The warpgroup that makes 16 bits of K and V of 8, for queries of 16: from the tiles as they were
// loaded to those that the tensor cores read. Keys become the queries' type, values float16, in
// which the weights are multiplied: it holds all values of 8 bits, and takes one instruction for
// two of e4m3, where bfloat16 takes four.
#pragma once

#include <flashinfer/attention/float8_mma.cuh>
#include <flashinfer/attention/hopper_tile.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/tma.cuh>

namespace flashinfer {

// Four 8-bit floats to four of T, exactly.
template <typename T, typename Float8>
__device__ __forceinline__ void widen_float8(uint32_t bytes, uint32_t& low, uint32_t& high) {
  float8_to_half2<Float8>(bytes, low, high);
  if constexpr (std::is_same_v<T, dtype::bfloat16>) {
    // Of a float that bfloat16 holds, it is the upper half; NaN and infinities stay.
    const auto convert = [](uint32_t& pair) {
      asm("{\n"
          ".reg .b16 first, second;\n"
          ".reg .b32 a, b;\n"
          "mov.b32 {first, second}, %0;\n"
          "cvt.f32.f16 a, first;\n"
          "cvt.f32.f16 b, second;\n"
          "prmt.b32 %0, a, b, 0x7632;\n"
          "}"
          : "+r"(pair));
    };
    convert(low);
    convert(high);
  } else {
    static_assert(std::is_same_v<T, dtype::float16>);
  }
}

// Four warps, a quarter of each tile's rows each, in pieces of eight rows by 64 columns, of which a
// lane takes 16.
template <typename Tile>
class HopperWidener {
  static constexpr int kRows = Tile::kTileKV / 4;
  template <bool kKeys>
  static constexpr int kChunks = ceil_div(kKeys ? Tile::kHeadDimQK : Tile::kHeadDimVO, 64);

 public:
  __device__ __forceinline__ HopperWidener(char* shared, HopperControl& control)
      : control_(control), lane_idx_(threadIdx.x % 32) {
    // Eight lanes, four in a row: in rows whose numbers differ in bit 2 they load from different
    // banks, in rows that differ in bit 0 they store to different ones.
    const int pair = lane_idx_ / 8, row = lane_idx_ / 4 % 2 == 0 ? pair : pair ^ 5;
    const int column = lane_idx_ % 4;
    const uint32_t rows = ptx::shared_address(shared) + (threadIdx.x / 32 % 4 * kRows + row) * 128;
    source_ = rows + (column ^ row) * 16;
    target_ = rows + (column * 2 ^ row) * 16;
  }

  // In the order in which the tiles are loaded.
  __device__ __forceinline__ void run() {
    while (true) {
      const auto& slot = control_.work[work_.stage];
      ptx::mbarrier_wait(address(control_.work_full[work_.stage]), work_.phase);
      if (slot.item.request < 0) return;
      const int num_tiles = ceil_div(max(slot.item.kv_end - slot.item.kv_begin, 0), Tile::kTileKV);
      arrive(control_.work_empty[work_.stage]);
      work_.advance();
      for (int tile = num_tiles - 1; tile >= -1 && num_tiles > 0; --tile) {
        if (tile >= 0) {
          widen<true>(k_ring_, control_.loaded_k_full, control_.loaded_k_empty, control_.k_full,
                      control_.k_empty);
        }
        if (tile < num_tiles - 1) {
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
    Ring<Tile::kLoadedStages> loaded;
    Ring<Tile::kStages> widened;
  };

  template <bool kKeys, typename Barriers>
  __device__ __forceinline__ void widen(Rings& rings, Barriers& loaded_full, Barriers& loaded_empty,
                                        Barriers& full, Barriers& empty) {
    constexpr int kPieces = kRows / 8 * kChunks<kKeys>;
    const auto& loaded = rings.loaded;
    const uint32_t source =
        source_ + (kKeys ? Tile::kOffsetLoadedK + loaded.stage * Tile::kBytesLoadedK
                         : Tile::kOffsetLoadedV + loaded.stage * Tile::kBytesLoadedV);
    const uint32_t second = source ^ 64;  // of the 128 columns in a row the second 64
    uint4 pieces[kPieces];
    ptx::mbarrier_wait(address(loaded_full[loaded.stage]), loaded.phase);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int rows = i / kChunks<kKeys> * 8, chunk = i % kChunks<kKeys>;
      pieces[i] = ptx::load_shared_16((chunk % 2 == 0 ? source : second) +
                                      (chunk / 2 * Tile::kTileKV + rows) * 128);
    }
    // In registers: the next tile may come, by the copy engine, hence the fence.
    ptx::async_proxy_fence();
    arrive(loaded_empty[loaded.stage]);
    rings.loaded.advance();

    const auto& widened = rings.widened;
    const uint32_t target = target_ + (kKeys ? Tile::kOffsetK + widened.stage * Tile::kBytesK
                                             : Tile::kOffsetV + widened.stage * Tile::kBytesV);
    const uint32_t next = target ^ 16;
    ptx::mbarrier_wait(address(empty[widened.stage]), widened.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int rows = i / kChunks<kKeys> * 8, chunk = i % kChunks<kKeys>;
      const uint32_t offset = (chunk * Tile::kTileKV + rows) * 128;
      store<kKeys>(pieces[i], target + offset, next + offset);
    }
    ptx::async_proxy_fence();
    arrive(full[widened.stage]);
    rings.widened.advance();
  }

  template <bool kKeys>
  __device__ __forceinline__ static void store(const uint4& piece, uint32_t target, uint32_t next) {
    using T = std::conditional_t<kKeys, typename Tile::Q, typename Tile::Mma>;
    uint4 low, high;
    widen_float8<T, typename Tile::KV>(piece.x, low.x, low.y);
    widen_float8<T, typename Tile::KV>(piece.y, low.z, low.w);
    widen_float8<T, typename Tile::KV>(piece.z, high.x, high.y);
    widen_float8<T, typename Tile::KV>(piece.w, high.z, high.w);
    ptx::store_shared_16(target, low);
    ptx::store_shared_16(next, high);
  }

  HopperControl& control_;
  const int lane_idx_;
  uint32_t source_, target_;  // this lane's first 16 bytes of a tile, before its offset
  Ring<HopperControl::kWorkStages> work_;
  Rings k_ring_, v_ring_;
};

}  // namespace flashinfer
