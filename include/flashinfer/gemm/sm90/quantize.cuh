// Results of 8 bits: factors that bring the sums into the range of E4M3.
//
// With block scales, 128 columns of a row share a scale that follows from the largest of them:
// their tile has all of these columns. Otherwise the caller gives the factor.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/gemm/sm90/producer.cuh>
#include <flashinfer/ptx/named_barrier.cuh>

namespace flashinfer {

template <typename Tile>
class GemmQuantizer {
  static constexpr float kMax = 448.f, kLeast = 1e-10f;
  static constexpr int kTiles = Tile::kTiles, kOutTiles = Tile::kOutRights / 8;
  static constexpr int kOutReps = Tile::kGated && Tile::kSwap ? 1 : Tile::kReps;
  static constexpr uint32_t kBarrier = 3;  // the epilogue's are 1 and 2
  static_assert(!Tile::kQuantizesBlocks || Tile::kOutColumns % 128 == 0, "blocks are whole");
  static_assert(!Tile::kQuantizesBlocks || !Tile::kSwap || (kOutReps == 1 && Tile::kConsumers == 2),
                "two warpgroups have the columns of one block");

 public:
  __device__ __forceinline__ GemmQuantizer(const GemmParams& params, uint32_t shared)
      : params_(params), maxima_(shared + Tile::kOffsetMaxima) {
    lane_idx_ = threadIdx.x % 32;
    warp_idx_ = threadIdx.x / 32;
  }

  // Multiplies the sums by their factors, and stores the scales if there is one for each block.
  template <typename Sums>
  __device__ __forceinline__ void run(const GemmWork& work, Sums& sums) const {
    if constexpr (!Tile::kQuantizesBlocks) {
      const float factor = __ldg(params_.out_factor + work.group * params_.out_factor_stride);
      multiply(sums, factor);
    } else if constexpr (Tile::kSwap) {
      quantize_right_rows(work, sums[0]);
    } else if constexpr (Tile::kDividesRight) {
      quantize_divided_rows(work, sums[0]);
    } else {
#pragma unroll
      for (int rep = 0; rep < kOutReps; ++rep) quantize_left_rows(work, rep, sums[rep]);
    }
  }

 private:
  template <typename Sums>
  __device__ __forceinline__ static void multiply(Sums& sums, float factor) {
#pragma unroll
    for (int rep = 0; rep < kOutReps; ++rep) {
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[rep][j][i] *= factor;
      }
    }
  }

  __device__ __forceinline__ void store_scale(const GemmWork& work, uint32_t row, uint32_t block,
                                              float scale) const {
    if (row < work.row_begin || row >= work.row_end) return;
    const uint32_t column = work.column + block * 128, blocks = num_columns() / 128;
    if (column < num_columns()) {
      params_.d_scale[static_cast<uint64_t>(row) * blocks + column / 128] = scale;
    }
  }

  // The largest of `kCount` tiles of left row `half` of a lane, whose columns four lanes have.
  template <int kCount>
  __device__ __forceinline__ static float largest_of(const float (&sums)[kTiles][4], int first,
                                                     int half) {
    float largest = kLeast;
#pragma unroll
    for (int j = first; j < first + kCount; ++j) {
      largest = fmaxf(largest, fabsf(sums[j][2 * half]));
      largest = fmaxf(largest, fabsf(sums[j][2 * half + 1]));
    }
    return warp_reduce_max(largest, 4);
  }

  template <int kCount>
  __device__ __forceinline__ static void multiply_half(float (&sums)[kTiles][4], int first,
                                                       int half, float factor) {
#pragma unroll
    for (int j = first; j < first + kCount; ++j) {
      sums[j][2 * half] *= factor;
      sums[j][2 * half + 1] *= factor;
    }
  }

  // Rows of D are left rows.
  __device__ __forceinline__ void quantize_left_rows(const GemmWork& work, int rep,
                                                     float (&sums)[kTiles][4]) const {
    constexpr int kBlockTiles = 16;
    const uint32_t left =
        (warp_idx_ / 4 * kOutReps + rep) * 64 + warp_idx_ % 4 * 16 + lane_idx_ / 4;
#pragma unroll
    for (int block = 0; block < kOutTiles / kBlockTiles; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float largest = largest_of<kBlockTiles>(sums, block * kBlockTiles, half);
        multiply_half<kBlockTiles>(sums, block * kBlockTiles, half, kMax / largest);
        if (lane_idx_ % 4 == 0) {
          store_scale(work, work.row + left + 8 * half, block, largest / kMax);
        }
      }
    }
  }

  // The same where each warpgroup has half of a block's columns.
  __device__ __forceinline__ void quantize_divided_rows(const GemmWork& work,
                                                        float (&sums)[kTiles][4]) const {
    constexpr int kThreads = Tile::kConsumerThreads;
    const uint32_t group = warp_idx_ / 4, left = warp_idx_ % 4 * 16 + lane_idx_ / 4;
    float largest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) largest[half] = largest_of<kOutTiles>(sums, 0, half);
    ptx::named_barrier_sync(kBarrier, kThreads);  // all have read the last tile's maxima
    if (lane_idx_ % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_float(maximum(group, left + 8 * half), largest[half]);
      }
    }
    ptx::named_barrier_sync(kBarrier, kThreads);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float other = load_float(maximum(1 - group, left + 8 * half));
      const float both = fmaxf(largest[half], other);
      multiply_half<kOutTiles>(sums, 0, half, kMax / both);
      if (group == 0 && lane_idx_ % 4 == 0) {
        store_scale(work, work.row + left + 8 * half, 0, both / kMax);
      }
    }
  }

  __device__ __forceinline__ uint32_t maximum(uint32_t warp, uint32_t row) const {
    return maxima_ + (warp * Tile::kTileRows + row) * 4;
  }

  // Rows of D are right rows: the columns of a row are in eight lanes of each warp.
  __device__ __forceinline__ void quantize_right_rows(const GemmWork& work,
                                                      float (&sums)[kTiles][4]) const {
    constexpr int kThreads = Tile::kConsumerThreads, kWarps = kThreads / 32;
    ptx::named_barrier_sync(kBarrier, kThreads);  // all have read the last tile's maxima
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float largest = fmaxf(fabsf(sums[j][i]), fabsf(sums[j][i + 2]));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        }
        if (lane_idx_ < 4) store_float(maximum(warp_idx_, j * 8 + lane_idx_ * 2 + i), largest);
      }
    }
    ptx::named_barrier_sync(kBarrier, kThreads);
    // A thread finds the factor of a row, which takes the place of the first warp's maximum.
#pragma unroll 1
    for (uint32_t row = threadIdx.x; row < kTiles * 8; row += kThreads) {
      float largest = kLeast;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        largest = fmaxf(largest, load_float(maximum(warp, row)));
      }
      store_float(maximum(0, row), kMax / largest);
      const bool owns = Tile::kSplits == 1 || row / 8 / Tile::kOwnedTiles == place_.split;
      if (owns) store_scale(work, work.row + row, 0, largest / kMax);
    }
    ptx::named_barrier_sync(kBarrier, kThreads);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor = load_float(maximum(0, j * 8 + lane_idx_ % 4 * 2 + i));
        sums[j][i] *= factor;
        sums[j][i + 2] *= factor;
      }
    }
  }

  __device__ __forceinline__ static void store_float(uint32_t shared, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(value) : "memory");
  }

  __device__ __forceinline__ static float load_float(uint32_t shared) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared) : "memory");
    return value;
  }

  __device__ __forceinline__ uint32_t num_columns() const {
    return Tile::kGated ? params_.n / 2 : params_.n;
  }

  const GemmParams& params_;
  const GemmPlace<Tile> place_;
  const uint32_t maxima_;
  uint32_t lane_idx_, warp_idx_;
};

}  // namespace flashinfer
