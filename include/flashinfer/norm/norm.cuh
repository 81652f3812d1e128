// RMS norm and layer norm of rows, with an optional residual added first and an optional 8-bit output:
//
//   h = x [+ residual]                     residual <- h, rounded
//   RMS:    y = h * rsqrt(mean(h^2) + eps) * (weight + weight_offset)
//   layer:  y = (h - mean(h)) * rsqrt(var(h) + eps) * weight + bias
//   out = y, rounded once                  8-bit: out = saturate(y / out_scale)
//
// A row stays in the registers of the threads that share it (a part of a warp, a warp, or a CTA), so each input byte is
// read once. All arithmetic is float, on the unrounded h. Each element is read and written by one thread, after all of
// that thread's reads: `out` may be `input`.
#pragma once

#include <flashinfer/collective/block_reduce.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/norm/norm_params.h>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/prefetch.cuh>
#include <type_traits>

namespace flashinfer {

template <typename T_, typename TOut_, bool kSubtractMean_, bool kAddResidual_>
struct NormTraits {
  using T = T_;
  using TOut = TOut_;
  using TWeight = std::conditional_t<kSubtractMean_, float, T>;  // of the bias too
  static constexpr bool kSubtractMean = kSubtractMean_;  // layer norm
  static constexpr bool kAddResidual = kAddResidual_;
  static constexpr bool kScaleOutput = dtype::kIsFloat8<TOut>;
  static constexpr int kVecSize = 16 / sizeof(T);
};

namespace detail {

template <typename T>
__device__ __forceinline__ T* norm_row(const NormRows& rows, uint32_t row, uint32_t num_heads) {
  T* data = static_cast<T*>(rows.data);
  if (num_heads == 1) return data + row * rows.stride_outer;
  return data + (row / num_heads) * rows.stride_outer + (row % num_heads) * rows.stride_inner;
}

__device__ __forceinline__ float norm_out_scale(const NormParams& params) {
  return 1.f / (params.out_scale ? *params.out_scale : params.out_scale_value);
}

// Sum over the threads of one row. `scratch` as for block_reduce_sum.
__device__ __forceinline__ float norm_row_sum(float x, float* scratch) {
  const int threads_per_row = static_cast<int>(blockDim.x);
  if (threads_per_row <= 32) return warp_reduce_sum(x, threads_per_row);
  return block_reduce_sum(x, scratch, threads_per_row / 32);
}

// Scales, converts and writes one vector of a row.
template <typename Traits, int kVecSize>
__device__ __forceinline__ void norm_store(const NormParams& params, uint32_t row, uint32_t vec_idx,
                                           const float (&h)[kVecSize], float mean, float inv_std,
                                           float inv_out_scale) {
  using TWeight = typename Traits::TWeight;
  using TOut = typename Traits::TOut;
  const uint32_t first = vec_idx * kVecSize;
  Vector<TWeight, kVecSize> weight, bias;
  weight.load(static_cast<const TWeight*>(params.weight) + first);
  if constexpr (Traits::kSubtractMean) bias.load(static_cast<const TWeight*>(params.bias) + first);
  float y[kVecSize];
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) {
    if constexpr (Traits::kSubtractMean) {
      y[j] = (h[j] - mean) * inv_std * weight[j] + bias[j];
    } else {
      y[j] = h[j] * inv_std * (weight[j] + params.weight_offset);
    }
    if constexpr (Traits::kScaleOutput) y[j] *= inv_out_scale;
  }
  Vector<TOut, kVecSize> y_out;
  y_out.from_floats(y);
  y_out.store(norm_row<TOut>(params.out, row, params.num_heads) + first);
}

}  // namespace detail

// Block (threads_per_row, rows_per_cta), grid ceil(num_rows / rows_per_cta).
template <typename Traits, int kVecsPerThread>
__global__ void __launch_bounds__(1024)
    norm_kernel(const __grid_constant__ NormParams params) {
  using T = typename Traits::T;
  using TWeight = typename Traits::TWeight;
  constexpr int kVecSize = Traits::kVecSize;
  constexpr bool kHeldAsFloat = Traits::kAddResidual;
  __shared__ float scratch[2][32];

  const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const uint32_t num_vecs = params.hidden_size / kVecSize;
  // Threads past the last row go on: the shuffles below need whole warps.
  const uint32_t num_row_vecs = row < params.num_rows ? num_vecs : 0;
  const T* input = detail::norm_row<const T>(params.input, row, params.num_heads);

  // The weight is needed last but is often the only operand that is not in L2 yet.
  const auto* weight_data = static_cast<const TWeight*>(params.weight);
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    const uint32_t vec_idx = threadIdx.x + i * blockDim.x;
    if (vec_idx < num_row_vecs) ptx::prefetch_l2(weight_data + vec_idx * kVecSize);
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  Vector<T, kVecSize> x[kVecsPerThread];
  float h[kHeldAsFloat ? kVecsPerThread : 1][kVecSize];
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    const uint32_t vec_idx = threadIdx.x + i * blockDim.x;
    if (vec_idx < num_row_vecs) {
      x[i].load(input + vec_idx * kVecSize);
    } else {
      x[i].words[0] = {};
    }
  }
  if constexpr (Traits::kAddResidual) {
    T* residual = detail::norm_row<T>(params.residual, row, params.num_heads);
    Vector<T, kVecSize> r[kVecsPerThread];
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      const uint32_t vec_idx = threadIdx.x + i * blockDim.x;
      if (vec_idx < num_row_vecs) {
        r[i].load(residual + vec_idx * kVecSize);
      } else {
        r[i].words[0] = {};
      }
    }
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      const uint32_t vec_idx = threadIdx.x + i * blockDim.x;
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) h[i][j] = x[i][j] + r[i][j];
      if (vec_idx < num_row_vecs) {
        r[i].from_floats(h[i]);
        r[i].store(residual + vec_idx * kVecSize);
      }
    }
  }
  const auto value = [&](int i, int j) -> float {
    if constexpr (kHeldAsFloat) {
      return h[i][j];
    } else {
      return x[i][j];
    }
  };

  const float inv_hidden_size = 1.f / static_cast<float>(params.hidden_size);
  float mean = 0.f;
  if constexpr (Traits::kSubtractMean) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) sum += value(i, j);
    }
    mean = detail::norm_row_sum(sum, scratch[0]) * inv_hidden_size;
  }
  float sum_squares = 0.f;
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    // Vectors past the end of the row are zero: they add nothing to a sum, but would to a centred one.
    const bool counts = !Traits::kSubtractMean || threadIdx.x + i * blockDim.x < num_row_vecs;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      const float centred = value(i, j) - mean;
      sum_squares += counts ? centred * centred : 0.f;
    }
  }
  sum_squares = detail::norm_row_sum(sum_squares, scratch[1]);
  const float inv_std = rsqrtf(sum_squares * inv_hidden_size + params.eps);
  const float inv_out_scale = Traits::kScaleOutput ? detail::norm_out_scale(params) : 1.f;

#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    const uint32_t vec_idx = threadIdx.x + i * blockDim.x;
    if (vec_idx >= num_row_vecs) break;
    float values[kVecSize];
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) values[j] = value(i, j);
    detail::norm_store<Traits>(params, row, vec_idx, values, mean, inv_std, inv_out_scale);
  }
}

// Rows of any size: one CTA per row, which it reads again for each pass (from L1 or L2). kVecSize 1 serves any alignment.
template <typename Traits, int kVecSize>
__global__ void __launch_bounds__(1024)
    norm_looped_kernel(const __grid_constant__ NormParams params) {
  using T = typename Traits::T;
  __shared__ float scratch[2][32];

  const uint32_t row = blockIdx.x;
  const uint32_t num_vecs = params.hidden_size / kVecSize;
  const T* input = detail::norm_row<const T>(params.input, row, params.num_heads);
  T* residual = nullptr;
  if constexpr (Traits::kAddResidual) {
    residual = detail::norm_row<T>(params.residual, row, params.num_heads);
  }
  const auto load = [&](uint32_t vec_idx, float(&h)[kVecSize]) {
    Vector<T, kVecSize> x, r;
    x.load(input + vec_idx * kVecSize);
    if constexpr (Traits::kAddResidual) r.load(residual + vec_idx * kVecSize);
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) h[j] = Traits::kAddResidual ? x[j] + r[j] : x[j];
  };
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  float h[kVecSize];
  const float inv_hidden_size = 1.f / static_cast<float>(params.hidden_size);
  float mean = 0.f;
  if constexpr (Traits::kSubtractMean) {
    float sum = 0.f;
    for (uint32_t i = threadIdx.x; i < num_vecs; i += blockDim.x) {
      load(i, h);
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) sum += h[j];
    }
    mean = detail::norm_row_sum(sum, scratch[0]) * inv_hidden_size;
  }
  float sum_squares = 0.f;
  for (uint32_t i = threadIdx.x; i < num_vecs; i += blockDim.x) {
    load(i, h);
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) sum_squares += (h[j] - mean) * (h[j] - mean);
  }
  sum_squares = detail::norm_row_sum(sum_squares, scratch[1]);
  const float inv_std = rsqrtf(sum_squares * inv_hidden_size + params.eps);
  const float inv_out_scale = Traits::kScaleOutput ? detail::norm_out_scale(params) : 1.f;

  for (uint32_t i = threadIdx.x; i < num_vecs; i += blockDim.x) {
    load(i, h);
    if constexpr (Traits::kAddResidual) {
      Vector<T, kVecSize> sum;
      sum.from_floats(h);
      sum.store(residual + i * kVecSize);
    }
    detail::norm_store<Traits>(params, row, i, h, mean, inv_std, inv_out_scale);
  }
}

#ifndef __CUDACC_RTC__

// `vectorizable`: hidden_size is a whole number of vectors and every row of every operand is aligned to its vectors.
template <typename Traits>
inline NormSchedule choose_norm_schedule(uint32_t num_rows, uint32_t hidden_size, bool vectorizable,
                                         int num_sms) {
  const uint32_t num_vecs = hidden_size / Traits::kVecSize;
  if (!vectorizable || num_vecs > 4 * 1024) {
    const uint32_t threads = hidden_size < 1024 ? round_up(hidden_size, 32u) : 1024;
    return {vectorizable ? NormSchedule::kLooped : NormSchedule::kElementwise,
            static_cast<int>(threads), 1};
  }
  if (num_vecs <= 128) {
    // A warp or less per row: no barrier, and several rows in flight per CTA.
    uint32_t threads = 1;
    while (threads < 32 && threads < num_vecs) threads *= 2;
    const uint32_t vecs = ceil_div(num_vecs, threads);
    return {vecs <= 1 ? 1 : vecs <= 2 ? 2 : 4, static_cast<int>(threads),
            static_cast<int>(128 / threads)};
  }
  // Fewer rows than CTAs fit on the chip: latency counts, so spread each row over more threads.
  const bool few_rows = num_rows <= static_cast<uint32_t>(2 * num_sms);
  int vecs_per_thread = few_rows ? 1 : 4;
  const uint32_t max_threads = few_rows ? 512 : 1024;
  while (vecs_per_thread < 4 && ceil_div<uint32_t>(num_vecs, vecs_per_thread) > max_threads) {
    vecs_per_thread *= 2;
  }
  const uint32_t threads = round_up(ceil_div<uint32_t>(num_vecs, vecs_per_thread), 32u);
  return {vecs_per_thread, static_cast<int>(threads), 1};
}

template <typename Traits>
inline cudaError_t launch_norm(const NormParams& params, const NormSchedule& schedule,
                               bool enable_pdl, cudaStream_t stream) {
  void (*kernel)(NormParams) = nullptr;
  switch (schedule.vecs_per_thread) {
    case NormSchedule::kElementwise:
      kernel = norm_looped_kernel<Traits, 1>;
      break;
    case NormSchedule::kLooped:
      kernel = norm_looped_kernel<Traits, Traits::kVecSize>;
      break;
    case 1:
      kernel = norm_kernel<Traits, 1>;
      break;
    case 2:
      kernel = norm_kernel<Traits, 2>;
      break;
    case 4:
      kernel = norm_kernel<Traits, 4>;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  const dim3 block(schedule.threads_per_row, schedule.rows_per_cta);
  const dim3 grid(ceil_div<uint32_t>(params.num_rows, schedule.rows_per_cta));
  return launch_kernel(kernel, grid, block, 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
