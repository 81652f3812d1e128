// RMS norm and layer norm of rows, with an optional residual added first and an optional 8-bit
// output:
//
//   h = x [+ residual]                     residual <- h, rounded
//   RMS:    y = h * rsqrt(mean(h^2) + eps) * (weight + weight_offset)
//   layer:  y = (h - mean(h)) * rsqrt(var(h) + eps) * weight + bias
//   out = y, rounded once                  8-bit: out = saturate(y / out_scale)
//
// A row stays in the registers of the threads that share it (a part of a warp, a warp, or a CTA),
// so each input byte is read once. All arithmetic is float, on the unrounded h. Each element is
// read and written by one thread, after all of that thread's reads: `out` may be `input`.
//
// Measurements, also of what lost: docs/tuning/norm.md.
#pragma once

#include <flashinfer/collective/block_reduce.cuh>
#include <flashinfer/collective/cluster_reduce.cuh>
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
  using TWeight = std::conditional_t<kSubtractMean_, float, T>;  // for the bias, too
  static constexpr bool kSubtractMean = kSubtractMean_;          // layer norm
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

// Prefetches a row to L2: a row that a later CTA reads, so that memory has work while CTAs reduce,
// or a CTA's first row while the preceding grid ends.
template <typename Traits>
__device__ __forceinline__ void prefetch_norm_row(const NormParams& params, uint32_t row) {
  using T = typename Traits::T;
  const uint32_t bytes = params.hidden_size * sizeof(T);
  ptx::prefetch_bulk_l2(norm_row<const T>(params.input, row, params.num_heads), bytes);
  if constexpr (Traits::kAddResidual) {
    ptx::prefetch_bulk_l2(norm_row<const T>(params.residual, row, params.num_heads), bytes);
  }
}

// Sum over the threads of one row. `scratch` is used as in block_reduce_sum.
__device__ __forceinline__ float norm_row_sum(float x, float* scratch) {
  const int threads_per_row = static_cast<int>(blockDim.x);
  if (threads_per_row <= 32) return warp_reduce_sum(x, threads_per_row);
  return block_reduce_sum(x, scratch, threads_per_row / 32);
}

template <typename Traits, int kVecSize>
struct NormAffine {
  Vector<typename Traits::TWeight, kVecSize> weight, bias;

  __device__ __forceinline__ void load(const NormParams& params, uint32_t vec_idx) {
    using TWeight = typename Traits::TWeight;
    weight.load(static_cast<const TWeight*>(params.weight) + vec_idx * kVecSize);
    if constexpr (Traits::kSubtractMean) {
      bias.load(static_cast<const TWeight*>(params.bias) + vec_idx * kVecSize);
    }
  }
};

// Scales, converts and writes one vector of a row.
template <typename Traits, int kVecSize>
__device__ __forceinline__ void norm_store(const NormParams& params, uint32_t row, uint32_t vec_idx,
                                           const float (&h)[kVecSize],
                                           const NormAffine<Traits, kVecSize>& affine, float mean,
                                           float inv_std, float inv_out_scale) {
  using TOut = typename Traits::TOut;
  float y[kVecSize];
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) {
    if constexpr (Traits::kSubtractMean) {
      y[j] = (h[j] - mean) * inv_std * affine.weight[j] + affine.bias[j];
    } else {
      y[j] = h[j] * inv_std * (affine.weight[j] + params.weight_offset);
    }
    if constexpr (Traits::kScaleOutput) y[j] *= inv_out_scale;
  }
  Vector<TOut, kVecSize> y_out;
  y_out.from_floats(y);
  y_out.store(norm_row<TOut>(params.out, row, params.num_heads) + vec_idx * kVecSize);
}

}  // namespace detail

// Block (threads_per_row, rows_per_cta): a CTA takes rows_per_cta rows at a time. kSpread says how
// rows are assigned to CTAs:
//   kOnce     each CTA takes rows once: grid ceil(num_rows / rows_per_cta)
//   kLoop     grid-strided; the next rows load while a CTA reduces and writes the current ones,
//             since memory would idle during the reduction
//   kCluster  each cluster of CTAs takes a row (sm_90): grid num_rows * cluster_size,
//             rows_per_cta 1
template <typename Traits, int kVecsPerThread, NormSpread kSpread>
__global__ void __launch_bounds__(1024 / kVecsPerThread, kVecsPerThread == 2 ? 2 : 1)
    norm_kernel(const __grid_constant__ NormParams params) {
  using T = typename Traits::T;
  constexpr int kVecSize = Traits::kVecSize;
  constexpr int kNumOperands = Traits::kAddResidual ? 2 : 1;
  using Vec = Vector<T, kVecSize>;
  // Weights stay in registers if they take at most 16 of them and the loop has no second operand to
  // hold.
  constexpr int kAffineBytes = kVecsPerThread * kVecSize * sizeof(typename Traits::TWeight) *
                               (Traits::kSubtractMean ? 2 : 1);
  constexpr bool kKeepAffine =
      kAffineBytes <= 64 && !(kSpread == NormSpread::kLoop && Traits::kAddResidual);
  constexpr int kScratchSize = kSpread == NormSpread::kCluster ? kMaxNormCluster * 32 : 32;
  __shared__ float scratch[2][2][kScratchSize];

  const uint32_t num_vecs = params.hidden_size / kVecSize;
  const uint32_t row_step = gridDim.x * blockDim.y;
  // The loop runs on the CTA's first row. Threads after the last row continue with zeros, since the
  // shuffles need whole warps.
  uint32_t first_row = blockIdx.x * blockDim.y;
  // The vectors of a warp are adjacent (0.5 to 2 KiB); HBM serves them faster than vectors that lie
  // part of a row apart.
  const uint32_t vec_stride = blockDim.x < 32 ? blockDim.x : 32;
  uint32_t first_vec = threadIdx.x / 32 * (32 * kVecsPerThread) + threadIdx.x % 32;
  uint32_t parity = 0;
  if constexpr (kSpread == NormSpread::kCluster) {
    first_row = blockIdx.x / ptx::cluster_size();
    first_vec += ptx::cluster_rank() * blockDim.x * kVecsPerThread;
    ptx::cluster_arrive();
  }

  const auto is_valid = [&](uint32_t r, int i) {
    return first_vec + i * vec_stride < num_vecs && r < params.num_rows;
  };
  const auto row_sum = [&](float x, int which) {
    if constexpr (kSpread == NormSpread::kCluster) {
      return cluster_reduce_sum(x, scratch[0][which], blockDim.x / 32);
    } else {
      return detail::norm_row_sum(x, scratch[parity][which]);
    }
  };
  const auto load_row = [&](uint32_t r, Vec(&x)[kNumOperands][kVecsPerThread]) {
#pragma unroll
    for (int k = 0; k < kNumOperands; ++k) {
      const T* data =
          detail::norm_row<const T>(k == 0 ? params.input : params.residual, r, params.num_heads);
#pragma unroll
      for (int i = 0; i < kVecsPerThread; ++i) {
        x[k][i].words[0] = {};
        if (is_valid(r, i)) x[k][i].load(data + (first_vec + i * vec_stride) * kVecSize);
      }
    }
  };

  // Prefetches the CTA's first rows while the preceding grid ends. Many small rows per CTA would
  // lose time by it.
  if ((kSpread != NormSpread::kLoop || blockDim.y == 1) && threadIdx.x == 0 &&
      first_row + threadIdx.y < params.num_rows) {
    detail::prefetch_norm_row<Traits>(params, first_row + threadIdx.y);
  }
  // The weight is needed last but is often the only operand that is not in L2 yet.
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    const uint32_t first = (first_vec + i * vec_stride) * kVecSize;
    if (is_valid(0, i)) {
      ptx::prefetch_l2(static_cast<const typename Traits::TWeight*>(params.weight) + first);
    }
  }
  ptx::grid_launch_and_wait();

  const float inv_hidden_size = 1.f / static_cast<float>(params.hidden_size);
  Vec next[kNumOperands][kVecsPerThread];
  load_row(first_row + threadIdx.y, next);
  // Loaded before the reductions; otherwise the latency of L2 would follow them.
  detail::NormAffine<Traits, kVecSize> affine[kKeepAffine ? kVecsPerThread : 1];
  if constexpr (kKeepAffine) {
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (is_valid(0, i)) affine[i].load(params, first_vec + i * vec_stride);
    }
  }
  const float inv_out_scale = Traits::kScaleOutput ? detail::norm_out_scale(params) : 1.f;
  if constexpr (kSpread == NormSpread::kCluster) ptx::cluster_wait();
  for (; first_row < params.num_rows; first_row += row_step, parity ^= 1) {
    const uint32_t row = first_row + threadIdx.y;
    Vec x[kVecsPerThread];
    float h[kVecsPerThread][kVecSize];
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      x[i] = next[0][i];
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        h[i][j] = Traits::kAddResidual ? x[i][j] + next[kNumOperands - 1][i][j] : x[i][j];
      }
    }
    if constexpr (Traits::kAddResidual) {
      // Written before the reduction, so that writes spread over its duration.
      T* residual = detail::norm_row<T>(params.residual, row, params.num_heads);
#pragma unroll
      for (int i = 0; i < kVecsPerThread; ++i) {
        if (!is_valid(row, i)) break;
        Vec sum;
        sum.from_floats(h[i]);
        sum.store(residual + (first_vec + i * vec_stride) * kVecSize);
      }
    }
    if constexpr (kSpread == NormSpread::kLoop) {
      if (first_row + row_step < params.num_rows) load_row(row + row_step, next);
    }

    float mean = 0.f;
    if constexpr (Traits::kSubtractMean) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kVecsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) sum += h[i][j];
      }
      mean = row_sum(sum, 0) * inv_hidden_size;
    }
    float sum_squares = 0.f;
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      // Vectors after the end of the row are zero: they add nothing to a plain sum, but would to a
      // centred one.
      const bool counts = !Traits::kSubtractMean || is_valid(row, i);
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        const float centred = h[i][j] - mean;
        sum_squares += counts ? centred * centred : 0.f;
      }
    }
    sum_squares = row_sum(sum_squares, 1);
    const float inv_std = rsqrtf(sum_squares * inv_hidden_size + params.eps);

#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (!is_valid(row, i)) break;
      const uint32_t vec_idx = first_vec + i * vec_stride;
      if constexpr (!kKeepAffine) affine[0].load(params, vec_idx);
      detail::norm_store<Traits>(params, row, vec_idx, h[i], affine[kKeepAffine ? i : 0], mean,
                                 inv_std, inv_out_scale);
    }
    if constexpr (kSpread != NormSpread::kLoop) break;
  }
}

// Kernel for rows of any size. Each CTA reads its row again for each pass (from L1 or L2). kVecSize
// 1 serves any alignment.
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
  const auto load = [&](uint32_t vec_idx, float (&h)[kVecSize]) {
    Vector<T, kVecSize> x, r;
    x.load(input + vec_idx * kVecSize);
    if constexpr (Traits::kAddResidual) r.load(residual + vec_idx * kVecSize);
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) h[j] = Traits::kAddResidual ? x[j] + r[j] : x[j];
  };
  // Prefetches as above; with a residual, long rows lose time by it.
  constexpr uint32_t kFirstRows = 256;  // at least as many CTAs run at a time
  constexpr uint32_t kMostBytes = 32768 / (Traits::kAddResidual ? 2 : 1);  // per row
  if (kVecSize > 1 && row < kFirstRows && params.hidden_size * sizeof(T) <= kMostBytes &&
      threadIdx.x == 0) {
    detail::prefetch_norm_row<Traits>(params, row);
  }
  ptx::grid_launch_and_wait();
  if (params.rows_ahead != 0 && threadIdx.x == 0 && row + params.rows_ahead < params.num_rows) {
    detail::prefetch_norm_row<Traits>(params, row + params.rows_ahead);
  }

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
    detail::NormAffine<Traits, kVecSize> affine;
    affine.load(params, i);
    detail::norm_store<Traits>(params, row, i, h, affine, mean, inv_std, inv_out_scale);
  }
}

#ifndef __CUDACC_RTC__

// Distance, per operand, between the row that a CTA works on and the row that it prefetches to L2.
// Rows fetched much earlier have left L2 when their turn comes.
inline constexpr uint32_t kNormBytesAhead = 2u << 20;

// Chooses the launch shape by rules measured on an NVIDIA H200 (bfloat16, launches in a CUDA graph,
// inputs not in L2); docs/tuning/norm.md has the numbers and the alternatives. `vectorizable`:
// hidden_size is a whole number of vectors, and every row of every operand is aligned to its
// vectors.
template <typename Traits>
inline NormSchedule choose_norm_schedule(uint32_t num_rows, uint32_t hidden_size, bool vectorizable,
                                         uint32_t num_sms, bool has_clusters) {
  using Spread = NormSpread;
  const uint32_t num_vecs = hidden_size / Traits::kVecSize;
  const auto looped = [&](uint32_t threads) -> NormSchedule {
    const auto ahead = static_cast<uint32_t>(kNormBytesAhead / (num_vecs * 16));
    return {NormSchedule::kLooped, Spread::kOnce, threads, 1, num_rows, 1, ahead};
  };
  if (!vectorizable) {
    const uint32_t threads = hidden_size < 1024 ? round_up(hidden_size, 32u) : 1024;
    return {NormSchedule::kElementwise, Spread::kOnce, threads, 1, num_rows, 1};
  }

  // With few wide rows latency counts, and a cluster shares a row. With many rows clusters lose by
  // far.
  if (has_clusters && num_rows <= 8 && num_vecs >= 1024) {
    const uint32_t cluster_size = num_vecs < 2048 ? 4 : kMaxNormCluster;
    const uint32_t threads = round_up(ceil_div(num_vecs, 2 * cluster_size), 32u);
    if (threads <= 512) {
      return {2, Spread::kCluster, threads, 1, num_rows * cluster_size, cluster_size};
    }
  }

  // For rows over 16 KiB, reading them again from L1 beats holding them in registers, which leaves
  // a CTA alone on its SM. From 64 KiB on, prefetched rows only take room.
  if (num_vecs > 1024) {
    const bool is_many = num_rows >= 12 * num_sms;  // fewer rows lose time by it
    const bool is_narrow = num_vecs <= 2048 && !Traits::kAddResidual;
    NormSchedule schedule = looped(is_narrow && (Traits::kSubtractMean || !is_many) ? 512 : 1024);
    if (!is_many || num_vecs > 4096) schedule.rows_ahead = 0;
    return schedule;
  }

  // A row of a warp or less needs no barrier. A thread takes four vectors if there are enough.
  if (num_vecs <= 128) {
    uint32_t threads = 8;
    while (threads < 32 && threads * 4 < num_vecs) threads *= 2;
    const uint32_t vecs = ceil_div(num_vecs, threads);
    const uint32_t rows_per_cta = (vecs > 2 ? 64 : 128) / threads;
    const uint32_t num_steps = ceil_div(num_rows, rows_per_cta);
    const uint32_t steps_per_cta = ceil_div(num_steps, num_sms * 2048 / (threads * rows_per_cta));
    return {vecs <= 1   ? 1
            : vecs <= 2 ? 2
                        : 4,
            steps_per_cta > 1 ? Spread::kLoop : Spread::kOnce,
            threads,
            rows_per_cta,
            ceil_div(num_steps, steps_per_cta),
            1};
  }

  // A CTA takes a row, with two vectors per thread. CTAs loop over equal numbers of rows once the
  // rows outnumber what the GPU holds at 1024 threads per SM. With very many rows it is faster
  // still if each row has its own CTA, holds nothing in registers, and prefetches a later row to
  // L2; rows of 4 KiB keep the loop.
  const uint32_t threads = round_up(ceil_div(num_vecs, 2u), 32u);
  uint32_t rows_per_loop = ceil_div(num_rows, num_sms * (1024 / threads));
  if constexpr (Traits::kSubtractMean) {
    // The float32 weight and bias of a layer norm are four times the bytes of a row. With one
    // vector per thread there are registers for them. With four vectors in fewer threads, several
    // CTAs share them in L1, which is faster than a loop that keeps them in registers.
    if (rows_per_loop <= 1) return {1, Spread::kOnce, round_up(num_vecs, 32u), 1, num_rows, 1};
    const uint32_t few_threads = round_up(ceil_div(num_vecs, 4u), 32u);
    rows_per_loop = ceil_div(num_rows, num_sms * (512 / few_threads));
    if (rows_per_loop >= 32 && num_vecs > 512) return looped(few_threads);
    return {4, Spread::kLoop, few_threads, 1, ceil_div(num_rows, rows_per_loop), 1};
  }
  // With a residual, prefetching beats the loop.
  if (Traits::kAddResidual && rows_per_loop >= 8) return looped(round_up(num_vecs, 32u));
  // Other 8-bit outputs are faster with persistent CTAs.
  if (!Traits::kScaleOutput && rows_per_loop >= 32) {
    if (num_vecs >= 512) return looped(threads);
    rows_per_loop = 4;
  }
  return {2,
          rows_per_loop > 1 ? Spread::kLoop : Spread::kOnce,
          threads,
          1,
          ceil_div(num_rows, rows_per_loop),
          1};
}

template <typename Traits, int kVecsPerThread>
inline auto norm_kernel_for(NormSpread spread) -> void (*)(NormParams) {
  switch (spread) {
    case NormSpread::kOnce:
      return norm_kernel<Traits, kVecsPerThread, NormSpread::kOnce>;
    case NormSpread::kLoop:
      return norm_kernel<Traits, kVecsPerThread, NormSpread::kLoop>;
    case NormSpread::kCluster:
      if constexpr (kVecsPerThread == 2) {
        return norm_kernel<Traits, kVecsPerThread, NormSpread::kCluster>;
      }
  }
  return nullptr;
}

template <typename Traits>
inline cudaError_t launch_norm(NormParams params, const NormSchedule& schedule, bool enable_pdl,
                               cudaStream_t stream) {
  params.rows_ahead = schedule.rows_ahead;
  void (*kernel)(NormParams) = nullptr;
  switch (schedule.vecs_per_thread) {
    case NormSchedule::kElementwise:
      kernel = norm_looped_kernel<Traits, 1>;
      break;
    case NormSchedule::kLooped:
      kernel = norm_looped_kernel<Traits, Traits::kVecSize>;
      break;
    case 1:
      kernel = norm_kernel_for<Traits, 1>(schedule.spread);
      break;
    case 2:
      kernel = norm_kernel_for<Traits, 2>(schedule.spread);
      break;
    case 4:
      kernel = norm_kernel_for<Traits, 4>(schedule.spread);
      break;
  }
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const dim3 block(schedule.threads_per_row, schedule.rows_per_cta);
  return launch_kernel(kernel, dim3(schedule.num_ctas), block, 0, stream, enable_pdl, params,
                       schedule.cluster_size);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
