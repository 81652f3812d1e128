// Shapes of an attention tile, and its way into shared memory and registers.
//
// A CTA of four warps holds `kTileQ` packed query rows and streams K and V in tiles of 64 tokens.
// kTileQ 16: the warps share the query rows and each takes 16 tokens of every K/V tile (decode).
// kTileQ 64, 128: each warp takes 16 or 32 query rows and all tokens. Either way a warp loads 16
// tokens of each tile. Rows in shared memory are padded to an odd number of 16-byte chunks, so that
// any eight consecutive rows are in different banks, whatever the head dim.
#pragma once

#include <cstdint>
#include <type_traits>
#include <flashinfer/attention/attention_params.h>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>

namespace flashinfer {

inline constexpr int kAttentionThreads = 128;
inline constexpr int kAttentionWarps = kAttentionThreads / 32;
inline constexpr int kTileKV = 64;
inline constexpr int kWarpTokens = kTileKV / kAttentionWarps;  // that a warp loads

// Shared memory a CTA may have on compute capability `cc` (90 for 9.0).
FLASHINFER_HOST_DEVICE constexpr int max_shared_bytes(int cc) {
  return cc == 86 || cc == 89 || cc >= 120 ? 99 << 10 : cc < 90 ? 163 << 10 : 227 << 10;
}

template <typename Q_, typename KV_, typename O_, int kHeadDimQK_, int kHeadDimVO_, int kTileQ_>
struct TileTraits {
  using Q = Q_;
  using KV = KV_;
  using O = O_;
  static constexpr bool kFloat8 = dtype::kIsFloat8<KV>;
  // 8-bit K and V are multiplied as float16, which holds all their values.
  using Mma = std::conditional_t<kFloat8, dtype::float16, KV>;
  static_assert(kFloat8 || std::is_same_v<Q, KV>, "16-bit q, k and v are of one type");
  static constexpr bool kScaledQ = kFloat8 && !std::is_same_v<Q, dtype::float16>;

  static constexpr int kHeadDimQK = kHeadDimQK_;
  static constexpr int kHeadDimVO = kHeadDimVO_;
  // A thread holds its rows of the output in registers: beyond 256 columns grid z shares them out.
  static constexpr int kOutputDim = kHeadDimVO <= 256 ? kHeadDimVO : kHeadDimVO / 2;
  static constexpr int kNumOutputParts = kHeadDimVO / kOutputDim;
  static_assert(kHeadDimQK % 16 == 0 && kOutputDim % 16 == 0 && kOutputDim <= 256);

  static constexpr int kTileQ = kTileQ_;
  static constexpr bool kSplitKV = kTileQ == 16;  // between the warps
  static constexpr int kWarpRows = kTileQ == 128 ? 32 : 16;
  static constexpr int kRowTiles = kWarpRows / 16;                  // of mma, per warp
  static constexpr int kWarpKV = kSplitKV ? kWarpTokens : kTileKV;  // tokens a warp multiplies
  static constexpr int kTokenTiles = kWarpKV / 8;
  static constexpr int kOutputTiles = kOutputDim / 8;
  static constexpr int kStepsQK = kHeadDimQK / 16;
  static constexpr bool kQInRegisters = kRowTiles == 1 && kHeadDimQK <= 128;

  static constexpr int padded(int row_bytes) { return ((row_bytes / 16) | 1) * 16; }
  static constexpr int kPitchQ = padded(kHeadDimQK * 2);
  static constexpr int kPitchK = padded(kHeadDimQK * static_cast<int>(sizeof(KV)));
  static constexpr int kPitchV = padded(kOutputDim * static_cast<int>(sizeof(KV)));
  static constexpr int kBytesQ = kTileQ * kPitchQ;
  static constexpr int kBytesK = kTileKV * kPitchK;
  static constexpr int kBytesV = kTileKV * kPitchV;
  static constexpr int kBytesScale = kScaledQ ? kTileQ * 4 : 0;
  // Where the warps' outputs meet (kSplitKV); takes the place of the K/V stages.
  static constexpr int kBytesExchange = kSplitKV ? kAttentionWarps * 16 * (kOutputDim + 2) * 4 : 0;

  // Decode keeps up to four tiles in flight, as long as three CTAs of head dim 128 fit an SM of
  // Hopper (measured: docs/performance.md); prefill is bound by the products and needs two.
  FLASHINFER_HOST_DEVICE static constexpr int num_stages(int cc) {
    constexpr int kWanted = kSplitKV ? (71680 / (kBytesK + kBytesV)) : 2;
    const int wanted = kWanted < 2 ? 2 : kWanted > 4 ? 4 : kWanted;
    const int fit = (max_shared_bytes(cc) - kBytesQ - kBytesScale) / (kBytesK + kBytesV);
    return fit < wanted ? (fit < 1 ? 1 : fit) : wanted;
  }
  FLASHINFER_HOST_DEVICE static constexpr int shared_bytes(int cc) {
    const int stages = num_stages(cc) * (kBytesK + kBytesV);
    return kBytesQ + kBytesScale + (stages > kBytesExchange ? stages : kBytesExchange);
  }
};

// Copies `kRows` rows of `kRowBytes` to shared memory. Lane i gives the `offset` of row i in bytes
// from `base`; negative: no such row, zeros.
template <int kRows, int kRowBytes, int kPitch>
__device__ __forceinline__ void copy_rows_async(uint32_t shared, const char* base, int64_t offset,
                                                int lane_idx) {
  constexpr int kChunks = kRowBytes / 16;
  constexpr int kTotal = kRows * kChunks;
#pragma unroll
  for (int i = 0; i < ceil_div(kTotal, 32); ++i) {
    const int chunk = i * 32 + lane_idx;
    const int row = chunk / kChunks % kRows, column = chunk % kChunks;
    const int64_t row_offset = __shfl_sync(0xffffffffu, offset, row);
    const bool exists = row_offset >= 0;
    if (kTotal % 32 == 0 || chunk < kTotal) {
      ptx::cp_async_16(shared + row * kPitch + column * 16,
                       base + (exists ? row_offset + column * 16 : 0), exists);
    }
  }
}

// Streams a warp's share of K and V: tokens kv_begin + 64 * tile + 16 * warp + {0 .. 15}. The page
// of the next tile is looked up one tile ahead, so that the copies never wait for it.
template <typename Traits, bool kPaged>
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(const AttentionTensors& tensors,
                                        const FastDivisor& page_size, const WorkItem& item,
                                        uint32_t kv_head, uint32_t output_part, uint32_t shared_k,
                                        int num_stages)
      : tensors_(tensors), page_size_(page_size), kv_end_(item.kv_end), kv_base_(item.kv_base) {
    lane_idx_ = threadIdx.x % 32;
    const int warp_idx = threadIdx.x / 32;
    token_ = item.kv_begin + warp_idx * kWarpTokens + lane_idx_ % kWarpTokens;
    constexpr int64_t kSize = sizeof(typename Traits::KV);
    k_ = static_cast<const char*>(tensors.k) + kv_head * tensors.k_stride_head * kSize;
    v_ = static_cast<const char*>(tensors.v) +
         (kv_head * tensors.v_stride_head + output_part * Traits::kOutputDim) * kSize;
    shared_k_ = shared_k + warp_idx * kWarpTokens * Traits::kPitchK;
    shared_v_ = shared_k + num_stages * Traits::kBytesK + warp_idx * kWarpTokens * Traits::kPitchV;
    look_up();
  }

  // Finds the rows of the current tile; the copies of K and V follow, each once.
  __device__ __forceinline__ void begin_tile() {
    constexpr int64_t kSize = sizeof(typename Traits::KV);
    bool exists = token_ < kv_end_;
    if constexpr (kPaged) {
      const uint32_t slot = token_ - page_size_.divide(token_) * page_size_.divisor;
      exists = exists && page_ < tensors_.num_pages;
      k_offset_ = (page_ * tensors_.k_stride_page + slot * tensors_.k_stride_token) * kSize;
      v_offset_ = (page_ * tensors_.v_stride_page + slot * tensors_.v_stride_token) * kSize;
    } else {
      const int64_t row = int64_t{kv_base_} + token_;
      k_offset_ = row * tensors_.k_stride_token * kSize;
      v_offset_ = row * tensors_.v_stride_token * kSize;
    }
    if (!exists) k_offset_ = v_offset_ = -1;
    token_ += kTileKV;
    look_up();
  }

  __device__ __forceinline__ void copy_k(int stage) {
    copy_rows_async<kWarpTokens, Traits::kHeadDimQK* static_cast<int>(sizeof(typename Traits::KV)),
                    Traits::kPitchK>(shared_k_ + stage * Traits::kBytesK, k_, k_offset_, lane_idx_);
  }

  __device__ __forceinline__ void copy_v(int stage) {
    copy_rows_async<kWarpTokens, Traits::kOutputDim* static_cast<int>(sizeof(typename Traits::KV)),
                    Traits::kPitchV>(shared_v_ + stage * Traits::kBytesV, v_, v_offset_, lane_idx_);
  }

 private:
  __device__ __forceinline__ void look_up() {
    if constexpr (kPaged) {
      page_ = 0;
      if (token_ < kv_end_) {
        page_ = static_cast<uint32_t>(tensors_.kv_indices[kv_base_ + page_size_.divide(token_)]);
      }
    }
  }

  const AttentionTensors& tensors_;
  const FastDivisor& page_size_;
  const char *k_, *v_;
  int64_t k_offset_, v_offset_;
  uint32_t shared_k_, shared_v_;
  int32_t token_, kv_end_, kv_base_;
  uint32_t page_ = 0;
  int lane_idx_;
};

}  // namespace flashinfer
