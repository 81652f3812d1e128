// First stage of the delta rule with a decay per key channel in chunks (KDA): computes what does
// not depend on the state, for every chunk of every head at once. docs/linear_attention.md derives
// it. With d(j, i] the product of the decays after token j up to token i, a vector of channels,
//   A_ij = beta_i sum_c k_ic d_c(j, i] k_jc        (j < i)
//   solve = (I + A)^-1 diag(beta)
//   scores_ij = scale sum_c q_ic d_c(j, i] k_jc    (j <= i)
// and keys and queries with the decays that they meet, which the second stage multiplies as they
// are: k d(.., i], scale q d(.., i] and k d(i, C].
//
// A decay between two tokens is a product of decays, never a quotient, so nothing overflows. The
// chunk's triangle consists of eight triangles of 8 tokens on the diagonal and squares of 32, 16
// and 8 below it. In a square all rows come after all columns, so d(j, i] is d(j, P] d(P, i] with
// the border P between them, and the square is a product of two 16-bit matrices. In a triangle
// the sums are float32.
#pragma once

#include <cstdint>
#include <flashinfer/linear_attention/chunk_channel_rows.cuh>
#include <flashinfer/ptx/opaque.cuh>

namespace flashinfer {

namespace detail {

// A warp's products for the squares: 16 rows of keys or queries with 16 columns of keys.
template <typename Traits>
struct SquareProducts {
  using T = typename Traits::T;
  using Shared = ChannelTransformShared<Traits>;
  static constexpr int kC = kChunkSize;

  const Shared& shared;
  float scale;
  int warp, lane;
  float large[2][4] = {}, small[2][4] = {};  // of the square of 32, and of one of 16 or two of 8

  // `left`: this lane's row; `right`: the first of the columns' rows.
  __device__ __forceinline__ void multiply(float (&sums)[2][4], const SquareTile<Traits>& tile,
                                           int left, int right) const {
    const uint32_t row = tile.address(left, lane / 16);
    const uint32_t column = tile.address(right + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < Traits::kHeadDimK / 16; ++step) {
      // Two units further within 128 bytes, which are swizzled, or in the next ones.
      const uint32_t units = step % 4 * 32, next = step / 4 * SquareTile<Traits>::kRows * 128;
      uint32_t a[4], b[4];
      ptx::ldmatrix_x4(a, (row ^ units) + next);
      ptx::ldmatrix_x4(b, (column ^ units) + next);
      ptx::mma_m16n8k16<T>(sums[0], a, b[0], b[1]);
      ptx::mma_m16n8k16<T>(sums[1], a, b[2], b[3]);
    }
  }

  // Warps share the square of 32 by rows, by keys and queries, and by columns. Then half of them
  // have the squares of 16; the others have keys and queries of a square of 8 in their 16 rows.
  __device__ __forceinline__ bool has_queries() const { return warp / 2 % 2; }
  __device__ __forceinline__ void compute() {
    const int strip = warp % 2 * 16, row = lane % 16;
    multiply(large, shared.tile(2), (has_queries() ? kC : kC / 2) + strip + row, warp / 4 * 16);
    if (warp < 4) {
      const int square = warp % 2;
      multiply(small, shared.tile(1), (has_queries() ? kC + 16 * square : 32 * square + 16) + row,
               32 * square);
    } else {
      const int square = warp - 4;
      multiply(small, shared.tile(0), row < 8 ? 16 * square + 8 + row : kC + 8 * square + row % 8,
               16 * square);
    }
  }

  __device__ __forceinline__ void store() const {
    const int strip = kC / 2 + warp % 2 * 16;
    store_block(large[0], has_queries(), strip, warp / 4 * 16);
    store_block(large[1], has_queries(), strip, warp / 4 * 16 + 8);
    if (warp < 4) {
      const int square = warp % 2 * 32;
      store_block(small[0], has_queries(), square + 16, square);
      store_block(small[1], has_queries(), square + 16, square + 8);
    } else {
      const int square = (warp - 4) * 16;
      store_pair(&small[0][0], false, square + 8 + lane / 4, square + lane % 4 * 2);
      store_pair(&small[0][2], true, square + 8 + lane / 4, square + lane % 4 * 2);
    }
  }

  __device__ __forceinline__ void store_block(const float (&sums)[4], bool is_query, int row,
                                              int column) const {
    store_pair(&sums[0], is_query, row + lane / 4, column + lane % 4 * 2);
    store_pair(&sums[2], is_query, row + 8 + lane / 4, column + lane % 4 * 2);
  }

  __device__ __forceinline__ void store_pair(const float* sums, bool is_query, int row,
                                             int column) const {
    const float2 norms = *reinterpret_cast<const float2*>(shared.key_norms() + column);
    const float factor = is_query ? scale * shared.query_norms()[row]
                                  : shared.betas()[row] * shared.key_norms()[row];
    const float low = sums[0] * factor * norms.x, high = sums[1] * factor * norms.y;
    if (is_query) {
      *reinterpret_cast<uint32_t*>(shared.scores() + row * Shared::kScoreStride + column) =
          PackedPair<T>::pack(low, high);
    } else {
      *reinterpret_cast<float2*>(shared.A() + row * kStride + column) = {low, high};
    }
  }
};

// Stores the triangle of a warp's 8 rows to A and the scores.
template <typename Traits>
__device__ __forceinline__ void store_triangle(const ChannelRows<Traits>& rows, float scale) {
  using Shared = ChannelTransformShared<Traits>;
  const Shared& shared = rows.shared;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int element = 32 * half + rows.lane;
    const float sum = rows.lane < 16 ? rows.triangle[2 * half] : rows.triangle[2 * half + 1];
    int i = 0;
#pragma unroll
    for (int m = 1; m < Shared::kRows; ++m) i += element >= m * m;
    const int place = element - i * i, row = rows.first_row() + i;
    if (place < i) {
      const int column = rows.first_row() + place;
      shared.A()[row * kStride + column] =
          sum * shared.betas()[row] * shared.key_norms()[row] * shared.key_norms()[column];
    } else {
      const int column = rows.first_row() + place - i;
      shared.scores()[row * Shared::kScoreStride + column] = from_float<typename Traits::T>(
          sum * scale * shared.query_norms()[row] * shared.key_norms()[column]);
    }
  }
}

// Stores scores and solve with zeros above the diagonal.
template <typename Traits>
__device__ __forceinline__ void store_squares(const ChannelTransformShared<Traits>& shared,
                                              typename Traits::T* scores,
                                              typename Traits::T* solve) {
  using T = typename Traits::T;
  using Shared = ChannelTransformShared<Traits>;
  constexpr int kSquare = kChunkSize * kChunkSize;
#pragma unroll
  for (int i = 0; i < kSquare / (4 * Shared::kThreads); ++i) {
    const int at = 4 * (i * Shared::kThreads + threadIdx.x), row = at / kChunkSize,
              column = at % kChunkSize;
    Vector<T, 4> score;
    score.load(shared.scores() + row * Shared::kScoreStride + column);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column + j > row) score.elements[j] = T{0};
    }
    score.store(scores + at);
    float4 values = *reinterpret_cast<const float4*>(shared.inverse() + row * kStride + column);
    const float4 betas = *reinterpret_cast<const float4*>(shared.betas() + column);
    if (row < 32 && column >= 32) values = {};
    const float products[4] = {values.x * betas.x, values.y * betas.y, values.z * betas.z,
                               values.w * betas.w};
    Vector<T, 4> result;
    result.from_floats(products);
    result.store(solve + at);
  }
}

}  // namespace detail

// The CTA computes one chunk of one head.
template <typename Traits>
__device__ __forceinline__ void transform_channel_chunk(
    const ChunkDeltaRuleParams& all, const ChannelTransformShared<Traits>& shared,
    const Chunk& chunk, int64_t slot, int head) {
  using T = typename Traits::T;
  constexpr int kDim = Traits::kHeadDimK, kSquare = kChunkSize * kChunkSize;
  const int thread = ptx::opaque(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const float scale = all.recurrence.scale;
  const int64_t index = slot * all.recurrence.state_heads + head;
  detail::ChannelRows<Traits> rows{all, shared, warp, lane};
  rows.load_rows(chunk, head);
  rows.load_gates(chunk, head);
  rows.store_norms();
  rows.store_block_decays();
  rows.multiply_triangle();
  __syncwarp();                 // so that the compiler does not keep the rows in registers:
  rows.load_rows(chunk, head);  // the triangle needs these
  __syncthreads();
  rows.store_operands(static_cast<T*>(all.workspace.operands) + index * 3 * kChunkSize * kDim);
  if (threadIdx.x < kDim) {
    float decay = 1.f;
#pragma unroll
    for (int block = 0; block < kChunkSize / 8; ++block) {
      decay *= shared.block_decays()[block * kDim + threadIdx.x];
    }
    all.workspace.factors[index * kDim + threadIdx.x] = decay;
  }
  __syncthreads();
  detail::SquareProducts<Traits> products{shared, scale, warp, lane};
  products.compute();
  __syncthreads();
  products.store();
  detail::store_triangle(rows, scale);
  __syncthreads();
  detail::invert_chunk<ChannelTransformShared<Traits>::kThreads>(shared.inverse(), shared.A());
  detail::store_squares(shared, static_cast<T*>(all.workspace.scores) + index * kSquare,
                        static_cast<T*>(all.workspace.solve) + index * kSquare);
}

template <typename Traits>
__global__ void __launch_bounds__(ChannelTransformShared<Traits>::kThreads, 2)
    chunk_channel_transform_kernel(const __grid_constant__ ChunkDeltaRuleParams all) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  const ChannelTransformShared<Traits> shared{dynamic_shared, ptx::shared_address(dynamic_shared)};
  transform_chunks(all, [&](const Chunk& chunk, int64_t slot, int head) {
    transform_channel_chunk<Traits>(all, shared, chunk, slot, head);
  });
}

}  // namespace flashinfer
