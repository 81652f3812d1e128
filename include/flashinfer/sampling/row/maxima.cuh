// Maxima of a row, and the search for its k-th largest element that starts from them.
#pragma once

#include <flashinfer/sampling/row/cluster.cuh>
#include <flashinfer/sampling/row/select.cuh>

namespace flashinfer {

// The largest element of a row, and lower bounds of its k-th largest element.
struct RowMaxima {
  float max;             // NaN if the row has one
  float min_warp_max;    // at least as many elements as there are warps reach it
  float min_thread_max;  // at least as many elements as there are threads reach it
};

namespace detail {

// Larger of two floats; NaN if either is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
#else
  return a != a ? a : b != b ? b : fmaxf(a, b);
#endif
}

template <typename Row>
__device__ __forceinline__ RowMaxima gather_maxima(Row& row, float thread_max) {
  float max = thread_max, min_max = thread_max;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    max = max_nan(max, __shfl_xor_sync(0xffffffffu, max, offset));
    min_max = fminf(min_max, __shfl_xor_sync(0xffffffffu, min_max, offset));
  }
  const uint64_t* list =
      row.gather(static_cast<uint64_t>(__float_as_uint(max)) << 32 | __float_as_uint(min_max));
  RowMaxima all{negative_infinity(), -negative_infinity(), -negative_infinity()};
  for (uint32_t i = row.lane_idx; i < row.num_ranks * row.num_warps; i += 32) {
    const float warp_max = __uint_as_float(static_cast<uint32_t>(list[i] >> 32));
    all.max = max_nan(all.max, warp_max);
    all.min_warp_max = fminf(all.min_warp_max, warp_max);
    all.min_thread_max = fminf(all.min_thread_max, __uint_as_float(static_cast<uint32_t>(list[i])));
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    all.max = max_nan(all.max, __shfl_xor_sync(0xffffffffu, all.max, offset));
    all.min_warp_max =
        fminf(all.min_warp_max, __shfl_xor_sync(0xffffffffu, all.min_warp_max, offset));
    all.min_thread_max =
        fminf(all.min_thread_max, __shfl_xor_sync(0xffffffffu, all.min_thread_max, offset));
  }
  return all;
}

// Key of the k-th largest element, 1 <= k < row.size.
template <typename Row>
__device__ __forceinline__ uint32_t select_top_k(Row& row, SelectStorage& storage,
                                                 const RowMaxima& maxima, uint32_t k) {
  const uint32_t num_warps = row.num_ranks * row.num_warps;
  const float low = k <= num_warps        ? maxima.min_warp_max
                    : k <= 32 * num_warps ? maxima.min_thread_max
                                          : negative_infinity();
  return select_threshold(row, storage, CountMeasure{}, float_to_key(low), float_to_key(maxima.max),
                          k);
}

}  // namespace detail

}  // namespace flashinfer
