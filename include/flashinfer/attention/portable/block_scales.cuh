// Scales of 4-bit K and V: copied beside their rows, multiplied into their fragments.
//
// A row of D codes has D / 16 scales (e4m3). A stage keeps those of K, then those of V, row by row.
// What a lane unpacks of a block of 32 columns belongs to one scale of each row: that of the half
// in which the lane's columns are. It reads the scales of 64 columns as a word.
#pragma once

#include <flashinfer/attention/portable/tile.cuh>
#include <flashinfer/common/float4_pairs.cuh>
#include <flashinfer/common/float8.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/fma_pair.cuh>

namespace flashinfer {

// Copies the scales of the 16 tokens of a warp: lanes 0 to 15 a row of K each, the others of V.
template <typename Tile>
class BlockScaleLoader {
  static constexpr int kWarpTokens = Tile::kWarpTokens;

 public:
  __device__ __forceinline__ BlockScaleLoader(const AttentionTensors& tensors, uint32_t kv_head,
                                              uint32_t output_part, uint32_t shared)
      : scales_(is_of_k() ? tensors.k_sf : tensors.v_sf) {
    const int warp_idx = threadIdx.x / 32;
    const int row = warp_idx * kWarpTokens + token();
    const int column_warp = warp_idx % Tile::kColumnWarps;
    const int part = is_of_k() ? column_warp * Tile::kScaleBytesK
                               : (output_part * Tile::kColumnWarps + column_warp) *
                                     Tile::kScaleBytesV;
    source_ = scales_.data + kv_head * scales_.stride_head + part;
    shared_ = shared + (is_of_k() ? row * Tile::kScaleBytesK
                                  : Tile::kRows * Tile::kScaleBytesK + row * Tile::kScaleBytesV);
  }

  // The lane's token among the warp's.
  __device__ __forceinline__ static int token() { return threadIdx.x % kWarpTokens; }

  // Locates the row for copy(): at `slot` of `page`, or at `slot` of the tokens.
  __device__ __forceinline__ void locate(uint32_t page, int64_t slot, bool exists) {
    offset_ = page * scales_.stride_page + slot * scales_.stride_token;
    exists_ = exists;
  }

  __device__ __forceinline__ void copy(int stage) const {
    const uint32_t target = shared_ + stage * Tile::kBytesBlockScales;
    if (Tile::kScaleBytesK == Tile::kScaleBytesV || is_of_k()) {
      copy_row<Tile::kScaleBytesK>(target);
    } else {
      copy_row<Tile::kScaleBytesV>(target);
    }
  }

 private:
  __device__ __forceinline__ static bool is_of_k() { return threadIdx.x % 32 < kWarpTokens; }

  template <int kBytes>
  __device__ __forceinline__ void copy_row(uint32_t target) const {
    constexpr int kChunk = kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : 4;
    const uint8_t* const source = source_ + offset_;
#pragma unroll
    for (int i = 0; i < kBytes; i += kChunk) {
      if constexpr (kChunk == 16) {
        ptx::cp_async_16(target + i, source + i, exists_);
      } else if constexpr (kChunk == 8) {
        ptx::cp_async_8(target + i, source + i, exists_);
      } else {
        ptx::cp_async_4(target + i, source + i, exists_);
      }
    }
  }

  const BlockScales scales_;
  const uint8_t* source_;
  uint32_t shared_;
  int64_t offset_;  // of the located row
  bool exists_;
};

// Scales of K rows for the lane's columns: `rows` are those of a tile from the lane's row on.
template <typename Tile>
struct KeyScales {
  const char* rows;

  // Two factors of row `row`, of the first and the second 32 columns from 64 * step on.
  __device__ __forceinline__ uint32_t get(int row, int step) const {
    const uint32_t bytes =
        *reinterpret_cast<const uint32_t*>(rows + row * Tile::kScaleBytesK + step * 4);
    const bool is_second = threadIdx.x % 4 >= 2;  // a lane of the quad has 8 columns of 32
    uint32_t pair, ignored;
    float8_to_half2<dtype::float8_e4m3fn>(__byte_perm(bytes, 0, is_second ? 0x4431 : 0x4420), pair,
                                          ignored);
    return pair;
  }
};

// Eight codes of a K row to pairs of the products' columns; see float4_column().
template <int kIndex>
__device__ __forceinline__ void float4_keys(uint32_t codes, uint32_t scales, uint32_t (&pairs)[4]) {
  e2m1_to_pairs<dtype::float16>(codes, pairs);
#pragma unroll
  for (int p = 0; p < 4; ++p) pairs[p] = ptx::scale_pair<kIndex>(pairs[p], scales);
}

// Scales of V rows for the lane's columns: `rows` are those of the product's 16 tokens.
template <typename Tile>
struct ValueScales {
  const char* rows;

  // Factors of tokens 2t and 2t + 1 of eight from `token` on, for the first and the second 32
  // columns from 64 * step on.
  __device__ __forceinline__ void get(int token, int step, uint32_t (&pairs)[2]) const {
    const char* const first = rows + (token + threadIdx.x % 4 * 2) * Tile::kScaleBytesV + step * 4;
    const uint32_t a = *reinterpret_cast<const uint32_t*>(first);
    const uint32_t b = *reinterpret_cast<const uint32_t*>(first + Tile::kScaleBytesV);
    const bool is_second = threadIdx.x % 32 >= 16;  // a lane has 4 columns of 32
    float8_to_half2<dtype::float8_e4m3fn>(__byte_perm(a, b, is_second ? 0x7351 : 0x6240), pairs[0],
                                          pairs[1]);
  }
};

// Four columns of two V rows, as a transposing ldmatrix leaves them, to a pair for each column.
__device__ __forceinline__ void float4_values(uint32_t codes, uint32_t scales,
                                              uint32_t (&columns)[4]) {
  e2m1_to_pairs<dtype::float16>(codes, columns);
#pragma unroll
  for (int p = 0; p < 4; ++p) columns[p] = ptx::multiply_pair(columns[p], scales);
}

}  // namespace flashinfer
