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

// Copies a row's scales.
template <int kBytes>
__device__ __forceinline__ void copy_scales(uint32_t target, const void* source, bool exists) {
  constexpr int kChunk = kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : 4;
  const char* const bytes = static_cast<const char*>(source);
#pragma unroll
  for (int i = 0; i < kBytes; i += kChunk) {
    if constexpr (kChunk == 16) {
      ptx::cp_async_16(target + i, bytes + i, exists);
    } else if constexpr (kChunk == 8) {
      ptx::cp_async_8(target + i, bytes + i, exists);
    } else {
      ptx::cp_async_4(target + i, bytes + i, exists);
    }
  }
}

// Copies a row's scales of K or of V, which a lane locates first.
class BlockScaleRow {
 public:
  __device__ __forceinline__ BlockScaleRow(const BlockScales& scales, int64_t begin,
                                           uint32_t shared)
      : scales_(scales), source_(scales.data + begin), shared_(shared) {}

  // At `slot` of `page`, or at `slot` of the tokens.
  __device__ __forceinline__ void locate(uint32_t page, int64_t slot) {
    offset_ = page * scales_.stride_page + slot * scales_.stride_token;
  }

  // `distance`: of the stage from the first one.
  template <int kBytes>
  __device__ __forceinline__ void copy(uint32_t distance, bool exists) const {
    copy_scales<kBytes>(shared_ + distance, source_ + offset_, exists);
  }

 private:
  const BlockScales scales_;
  const uint8_t* source_;
  uint32_t shared_;
  int64_t offset_;  // of the located row
};

// Copies the scales of a warp's tokens. Of 16 tokens, lanes 0 to 15 copy a row of K each and the
// others of V; of 32, each lane copies a row of both.
template <typename Tile>
class BlockScaleLoader {
  static constexpr bool kHasBoth = Tile::kWarpTokens == 32;

 public:
  __device__ __forceinline__ BlockScaleLoader(const AttentionTensors& tensors, uint32_t kv_head,
                                              uint32_t output_part, uint32_t shared)
      : shared_(shared),
        k_(reinterpret_cast<const char*>(tensors.k_sf.data)),
        v_(reinterpret_cast<const char*>(tensors.v_sf.data)),
        first_(is_of_v() ? make_v(tensors, kv_head, output_part, shared)
                         : make_k(tensors, kv_head, shared)),
        second_(make_v(tensors, kv_head, output_part, shared)) {}

  // Locates the row of the lane's token for copy().
  __device__ __forceinline__ void locate(uint32_t page, int64_t slot, bool exists) {
    first_.locate(page, slot);
    if constexpr (kHasBoth) second_.locate(page, slot);
    exists_ = exists;
  }

  // Whether the rows of a page follow each other, and those of V lie where those of K do.
  __device__ __forceinline__ static bool are_dense(const AttentionTensors& tensors) {
    const BlockScales &k = tensors.k_sf, &v = tensors.v_sf;
    return k.stride_token == Tile::kScaleBytesK && v.stride_token == Tile::kScaleBytesV &&
           k.stride_page == v.stride_page && k.stride_head == v.stride_head;
  }

  // Then K's row of the lane's token in a group of 16 that begins the first page.
  __device__ __forceinline__ static const char* dense_source(const AttentionTensors& tensors,
                                                             uint32_t kv_head) {
    return reinterpret_cast<const char*>(tensors.k_sf.data) + kv_head * tensors.k_sf.stride_head +
           threadIdx.x % 16 * Tile::kScaleBytesK;
  }

  // Then copies the lane's row of K at `source`, and that of V.
  __device__ __forceinline__ void copy_dense(const char* source, bool exists, int stage) const {
    const uint32_t target = shared_ + row() * Tile::kScaleBytesK + stage * Tile::kBytesBlockScales;
    copy_scales<Tile::kScaleBytesK>(target, source, exists);
    copy_scales<Tile::kScaleBytesV>(target + Tile::kRows * Tile::kScaleBytesK, source + (v_ - k_),
                                    exists);
  }

  __device__ __forceinline__ void copy(int stage) const {
    const uint32_t distance = stage * Tile::kBytesBlockScales;
    if (Tile::kScaleBytesK == Tile::kScaleBytesV || !is_of_v()) {
      first_.template copy<Tile::kScaleBytesK>(distance, exists_);
    } else {
      first_.template copy<Tile::kScaleBytesV>(distance, exists_);
    }
    if constexpr (kHasBoth) second_.template copy<Tile::kScaleBytesV>(distance, exists_);
  }

 private:
  // Whether the lane's first row is of V.
  __device__ __forceinline__ static bool is_of_v() { return !kHasBoth && threadIdx.x % 32 >= 16; }

  // The lane's row in a stage.
  __device__ __forceinline__ static int row() {
    return threadIdx.x / 32 * Tile::kWarpTokens + threadIdx.x % Tile::kWarpTokens;
  }
  __device__ __forceinline__ static int column_warp() {
    return threadIdx.x / 32 % Tile::kColumnWarps;
  }
  __device__ __forceinline__ static BlockScaleRow make_k(const AttentionTensors& tensors,
                                                         uint32_t kv_head, uint32_t shared) {
    const int64_t begin = kv_head * tensors.k_sf.stride_head + column_warp() * Tile::kScaleBytesK;
    return BlockScaleRow(tensors.k_sf, begin, shared + row() * Tile::kScaleBytesK);
  }
  __device__ __forceinline__ static BlockScaleRow make_v(const AttentionTensors& tensors,
                                                         uint32_t kv_head, uint32_t output_part,
                                                         uint32_t shared) {
    const int64_t part = output_part * Tile::kColumnWarps + column_warp();
    const int64_t begin = kv_head * tensors.v_sf.stride_head + part * Tile::kScaleBytesV;
    const uint32_t rows_of_k = Tile::kRows * Tile::kScaleBytesK;
    return BlockScaleRow(tensors.v_sf, begin, shared + rows_of_k + row() * Tile::kScaleBytesV);
  }

  const uint32_t shared_;
  const char *const k_, *const v_;
  BlockScaleRow first_, second_;
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
