// RMS norm of rows, fused with the step that follows it:
//
//   h = input [+ residual]                         residual <- h, rounded
//   y = h * rsqrt(mean(h^2) + eps) * weight        normed_out <- y, rounded
//   y = silu(y), if requested
//   out = y, or codes and scales of groups of y: see group_scale.cuh
//
// Before groups are quantised, y is rounded to the input's type, so that the codes equal those of
// quantising the norm's result. One row is held in the registers of a CTA, or of a warp if it is
// short; rows that do not fit are read twice.
//
// Measurements, also of what lost: docs/tuning/fused_norm.md.
#pragma once

#include <flashinfer/activation/activation.cuh>
#include <flashinfer/collective/block_reduce.cuh>
#include <flashinfer/collective/copied_row.cuh>
#include <flashinfer/collective/group_max.cuh>
#include <flashinfer/common/device_info.h>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/norm/fused_rmsnorm_params.h>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/prefetch.cuh>
#include <flashinfer/quantization/group_scale.cuh>
#include <flashinfer/quantization/scale_layout.h>

namespace flashinfer {

// Output formats of a row.
namespace norm_output {

// Elements of a floating-point type, converted by rounding (8 bits saturate).
template <typename TOut>
struct elements {
  static constexpr int kGroupSize = 1;
  static constexpr bool kIsFloat8 = dtype::kIsFloat8<TOut>;
  using Element = TOut;
};

// Codes with a scale per group.
template <typename Code_, typename Scale_, typename Layout_, int kGroupSize_>
struct groups {
  static constexpr int kGroupSize = kGroupSize_;
  static constexpr bool kIsFloat8 = false;  // rounds to the input's type before quantising
  using Code = Code_;
  using Scale = Scale_;
  using Layout = Layout_;
};

// float32 scales for block-scaled matrix products as in DeepSeek's models.
using e4m3_blocks = groups<code::e4m3, scale::float32, layout::column_major, 128>;
using float32 = elements<dtype::float32>;
using float16 = elements<dtype::float16>;
using bfloat16 = elements<dtype::bfloat16>;
using float8_e4m3fn = elements<dtype::float8_e4m3fn>;

}  // namespace norm_output

template <typename T_, typename Output_, bool kAddResidual_, bool kSilu_>
struct FusedRmsnormTraits {
  using T = T_;
  using Output = Output_;
  static constexpr bool kAddResidual = kAddResidual_;
  static constexpr bool kSilu = kSilu_;
  static constexpr bool kGroups = Output::kGroupSize > 1;
  static constexpr bool kRoundsTo8Bits = Output::kIsFloat8;
  // Groups use two adjacent accesses, so that half as many lanes share a scale and compute it. With
  // a residual, registers are too scarce for that.
  static constexpr int kVecSize = (kGroups && !kAddResidual ? 32 : 16) / sizeof(T);
  static constexpr int kMostVecs = 64 / (kVecSize * sizeof(T));  // 64 bytes per thread
  static constexpr int kLanesPerGroup = kGroups ? Output::kGroupSize / kVecSize : 1;
  // Smaller magnitudes do not make a scale smaller; DeepSeek's kernels use the same value.
  static constexpr float kGroupEps = 1e-4f;
};

namespace detail {

template <typename Traits>
__device__ __forceinline__ void zero_scales(const FusedRmsnormParams& params, uint32_t row) {
  using Output = typename Traits::Output;
  const uint32_t groups = params.hidden_size / Output::kGroupSize;
  for (uint32_t group = threadIdx.x; group < groups; group += blockDim.x) {
    const int64_t offset = Output::Layout::offset(row, group, groups, params.scale_stride);
    static_cast<typename Output::Scale::Stored*>(params.scale)[offset] = 0;
  }
}

// Prefetches a row, if it exists, to L2 with one thread of a CTA.
template <typename Traits>
__device__ __forceinline__ void prefetch_row(const FusedRmsnormParams& params, uint32_t row) {
  using T = typename Traits::T;
  const uint32_t bytes = params.hidden_size * sizeof(T);
  if (!params.vectorizable || row >= params.num_rows) return;
  ptx::prefetch_bulk_l2(static_cast<const T*>(params.input) + row * params.input_stride, bytes);
  if constexpr (Traits::kAddResidual) {
    ptx::prefetch_bulk_l2(static_cast<const T*>(params.residual) + row * params.residual_stride,
                          bytes);
  }
}

// Prefetches the row that is params.rows_ahead after `row`, so that memory has work while CTAs
// reduce.
template <typename Traits>
__device__ __forceinline__ void prefetch_later_row(const FusedRmsnormParams& params, uint32_t row) {
  if (params.rows_ahead != 0) prefetch_row<Traits>(params, row + params.rows_ahead);
}

template <typename Traits, int N>
__device__ __forceinline__ Vector<typename Traits::T, N> load_norm_sum(
    const FusedRmsnormParams& params, uint32_t row, uint32_t col, float (&h)[N]) {
  using T = typename Traits::T;
  Vector<T, N> x, r;
  x.load(static_cast<const T*>(params.input) + row * params.input_stride + col);
  if constexpr (Traits::kAddResidual) {
    r.load(static_cast<const T*>(params.residual) + row * params.residual_stride + col);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) h[j] = Traits::kAddResidual ? x[j] + r[j] : x[j];
  return x;
}

// Finishes one vector. All lanes of the warp take part; only valid ones write.
template <typename Traits, int N>
__device__ __forceinline__ void finish_norm(const FusedRmsnormParams& params, uint32_t row,
                                            uint32_t col, bool is_valid, const float (&h)[N],
                                            const Vector<typename Traits::T, N>& weight,
                                            float inv_rms) {
  using T = typename Traits::T;
  using Output = typename Traits::Output;
  float y[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    y[j] = h[j] * inv_rms * weight[j];
    if constexpr (Traits::kSilu) {
      if constexpr (Traits::kRoundsTo8Bits) {
        y[j] = act::silu_for_8_bits(y[j]);
      } else {
        y[j] = act::silu::apply<sizeof(T) == 4>(y[j]);
      }
    }
  }
  if constexpr (Traits::kAddResidual) {
    Vector<T, N> sum;
    sum.from_floats(h);
    if (is_valid) {
      sum.store(static_cast<T*>(params.residual) + row * params.residual_stride + col);
    }
  }
  auto* out = static_cast<uint8_t*>(params.out) + row * params.out_stride;
  if constexpr (!Traits::kGroups) {
    Vector<typename Output::Element, N> rounded;
    rounded.from_floats(y);
    if (is_valid) rounded.store(reinterpret_cast<typename Output::Element*>(out) + col);
  } else {
    Vector<T, N> rounded;
    rounded.from_floats(y);
    if (is_valid && params.normed_out != nullptr) {
      rounded.store(static_cast<T*>(params.normed_out) + row * params.normed_stride + col);
    }
    MagnitudeMax<T> magnitude;
    magnitude.include(rounded);
    const float amax = magnitude.template reduce<Traits::kLanesPerGroup>();
    const auto scale =
        Output::Scale::template of<typename Output::Code>(amax, Traits::kGroupEps, 1.f);
    if (!is_valid) return;
    const uint32_t group = col / Output::kGroupSize;
    if (col % Output::kGroupSize == 0) {
      const uint32_t groups = params.hidden_size / Output::kGroupSize;
      const int64_t offset = Output::Layout::offset(row, group, groups, params.scale_stride);
      static_cast<typename Output::Scale::Stored*>(params.scale)[offset] = scale.stored;
    }
    CodeVector<typename Output::Code, N> codes;
    rounded.to_floats(y);
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] = scale.template apply<T>(y[j]);
    codes.from_floats(y);
    reinterpret_cast<decltype(codes.word)*>(out)[col / N] = codes.word;
  }
}

}  // namespace detail

// Bytes of input that the first CTAs prefetch to L2 while the preceding grid ends; about as much is
// read at a time.
inline constexpr uint64_t kFirstBytes = uint64_t{8} << 20;
inline constexpr uint32_t kLeastFirstRow = 8192;  // bytes; shorter rows lose time by it

// blockDim.x threads (whole warps) share a row and hold kVecsPerThread vectors each. A CTA takes
// blockDim.y rows at a time, one per warp if there are several. With kLoop it continues with rows a
// grid further, whose loads are in flight while it reduces and writes the current ones. The
// schedules are those of norm.cuh.
template <typename Traits, int kVecsPerThread, bool kLoop>
__global__ void __launch_bounds__(kVecsPerThread == 4 ? 128 : 512)
    fused_rmsnorm_kernel(const __grid_constant__ FusedRmsnormParams params) {
  using T = typename Traits::T;
  constexpr int kVecSize = Traits::kVecSize;
  constexpr bool kKeepWeight = !(kLoop && Traits::kAddResidual);
  __shared__ float scratch[2][32];
  const uint32_t row_step = gridDim.x * blockDim.y;
  const uint32_t num_rows = Traits::kGroups ? params.scale_rows : params.num_rows;
  // The vectors of a warp are adjacent.
  const uint32_t first_vec = threadIdx.x / 32 * (32 * kVecsPerThread) + threadIdx.x % 32;
  const auto col_of = [&](int i) { return (first_vec + i * 32) * kVecSize; };
  const auto is_valid = [&](uint32_t row, int i) {
    return row < params.num_rows && col_of(i) < params.hidden_size;
  };
  Vector<T, kVecSize> next[kVecsPerThread], next_residual[kVecsPerThread], weight[kVecsPerThread];
  const auto load_row = [&](uint32_t row) {
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      next[i].clear();
      next_residual[i].clear();
      if (!is_valid(row, i)) continue;
      next[i].load(static_cast<const T*>(params.input) + row * params.input_stride + col_of(i));
      if constexpr (Traits::kAddResidual) {
        next_residual[i].load(static_cast<const T*>(params.residual) +
                              row * params.residual_stride + col_of(i));
      }
    }
  };
  const auto load_weight = [&](int i) {
    weight[i].clear();
    if (col_of(i) < params.hidden_size) {
      weight[i].load(static_cast<const T*>(params.weight) + col_of(i));
    }
  };

  uint32_t first_row = blockIdx.x * blockDim.y;
  const uint32_t row_bytes = params.hidden_size * sizeof(T);
  if (row_bytes >= kLeastFirstRow && uint64_t{first_row} * row_bytes < kFirstBytes) {
    if (threadIdx.x == 0) detail::prefetch_row<Traits>(params, first_row + threadIdx.y);
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (col_of(i) < params.hidden_size) {
        ptx::prefetch_l2(static_cast<const T*>(params.weight) + col_of(i));
      }
    }
  }
  ptx::grid_launch_and_wait();
  if (!kLoop && threadIdx.x == 0) {
    detail::prefetch_later_row<Traits>(params, first_row + threadIdx.y);
  }
  load_row(first_row + threadIdx.y);
  if constexpr (kKeepWeight) {
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) load_weight(i);
  }
  // All threads of a CTA run the same number of rounds, because the reduction has a barrier.
  for (uint32_t parity = 0; first_row < num_rows; first_row += row_step, parity ^= 1) {
    const uint32_t row = first_row + threadIdx.y;
    float h[kVecsPerThread][kVecSize];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        h[i][j] = Traits::kAddResidual ? next[i][j] + next_residual[i][j] : next[i][j];
        sum += h[i][j] * h[i][j];
      }
    }
    if constexpr (kLoop) load_row(row + row_step);
    sum = blockDim.x == 32
              ? warp_reduce_sum(sum)
              : block_reduce_sum(sum, scratch[parity], static_cast<int>(blockDim.x) / 32);
    const float inv_rms = rsqrtf(sum * params.inv_hidden_size + params.eps);
    if constexpr (Traits::kGroups) {
      if (row >= params.num_rows && row < num_rows) detail::zero_scales<Traits>(params, row);
    }
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if constexpr (!kKeepWeight) load_weight(i);
      detail::finish_norm<Traits>(params, row, col_of(i), is_valid(row, i), h[i], weight[i],
                                  inv_rms);
    }
    if constexpr (!kLoop) break;
  }
}

// Kernel for many rows. Each CTA takes one row, which the copy engine brings to shared memory
// (sm_90), so that six or more rows are on an SM in different phases; the loop above has two. A
// thread handles 64 bytes. kThreads is the CTA's size if its row is 64 bytes per thread; 0 means
// known only at launch. With a residual, copies lose to the loop and prefetching later rows gains.
inline constexpr int kCopiedBytesPerThread = 64;
inline constexpr int kCopiedThreads = 256;  // at most
inline constexpr uint32_t kCopiedBytesAhead = 4u << 20;
inline constexpr uint32_t kResidualBytesAhead = 2u << 20;  // per operand

// An SM has registers for six CTAs of 224 threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kCopiedThreadsOfSm = kCopiedThreads;
#else
inline constexpr int kCopiedThreadsOfSm = 6 * 224;
#endif
template <typename T, int kThreads>
inline constexpr int kCopiedCtas =
    kThreads != 0 && sizeof(T) == 2 ? kCopiedThreadsOfSm / kThreads : 1;

template <typename Traits, int kThreads>
__global__ void __launch_bounds__(kThreads == 0 ? kCopiedThreads : kThreads,
                                  kCopiedCtas<typename Traits::T, kThreads>)
    fused_rmsnorm_copied_kernel(const __grid_constant__ FusedRmsnormParams params) {
#if __CUDA_ARCH__ >= 900
  using T = typename Traits::T;
  constexpr int kVecSize = Traits::kVecSize;
  constexpr int kChunkSize = 16 / sizeof(T), kChunks = kVecSize / kChunkSize;
  constexpr int kVecs = kCopiedBytesPerThread / 16 / kChunks;
  extern __shared__ uint4 copies[];
  __shared__ float scratch[32];
  __shared__ uint64_t arrival;
  const uint32_t row = blockIdx.x, threads = kThreads == 0 ? blockDim.x : kThreads;
  const uint32_t num_vecs = params.hidden_size / kVecSize, num_chunks = num_vecs * kChunks;
  const auto is_valid = [](uint32_t i, uint32_t count) { return kThreads != 0 || i < count; };
  if (threadIdx.x == 0 && uint64_t{row} * num_chunks * 16 < kFirstBytes) {
    detail::prefetch_row<Traits>(params, row);
  }
  ptx::grid_launch_and_wait();
  if constexpr (Traits::kGroups) {
    if (row >= params.num_rows) {
      detail::zero_scales<Traits>(params, row);
      return;
    }
  }
  start_row_copy(static_cast<const T*>(params.input) + row * params.input_stride, num_chunks * 16,
                 copies, &arrival);
  if (threadIdx.x == 0) detail::prefetch_later_row<Traits>(params, row);
  Vector<T, kVecSize> weight[kVecs];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const uint32_t i = threadIdx.x + k * threads;
    weight[k].clear();
    if (is_valid(i, num_vecs)) weight[k].load(static_cast<const T*>(params.weight) + i * kVecSize);
  }
  wait_for_row_copy(&arrival);

  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < kVecs * kChunks; ++k) {
    const uint32_t i = threadIdx.x + k * threads;
    Vector<T, kChunkSize> x;
    x.clear();
    if (is_valid(i, num_chunks)) x.words[0] = copies[i];
    float h[kChunkSize];
    x.to_floats(h);
#pragma unroll
    for (int j = 0; j < kChunkSize; ++j) sum += h[j] * h[j];
  }
  sum = block_reduce_sum(sum, scratch, static_cast<int>(threads) / 32);
  const float inv_rms = rsqrtf(sum * params.inv_hidden_size + params.eps);
  // Loaded before the stores, since the compiler moves no load across them.
  Vector<T, kVecSize> x[kVecs];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const uint32_t i = threadIdx.x + k * threads;
    x[k].clear();
    if (!is_valid(i, num_vecs)) continue;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) x[k].words[c] = copies[i * kChunks + c];
  }
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const uint32_t i = threadIdx.x + k * threads;
    float h[kVecSize];
    x[k].to_floats(h);
    detail::finish_norm<Traits>(params, row, i * kVecSize, is_valid(i, num_vecs), h, weight[k],
                                inv_rms);
  }
#endif
}

// Kernel for rows of any length. Each CTA reads its row twice; kVecSize 1 serves any alignment.
template <typename Traits, int kVecSize>
__global__ void __launch_bounds__(1024)
    fused_rmsnorm_looped_kernel(const __grid_constant__ FusedRmsnormParams params) {
  using T = typename Traits::T;
  __shared__ float scratch[32];
  const uint32_t row = blockIdx.x;
  const uint32_t num_vecs = params.hidden_size / kVecSize;
  float h[kVecSize];
  ptx::grid_launch_and_wait();
  if constexpr (Traits::kGroups) {
    if (row >= params.num_rows) {
      detail::zero_scales<Traits>(params, row);
      return;
    }
  }
  float sum = 0.f;
  for (uint32_t i = threadIdx.x; i < num_vecs; i += blockDim.x) {
    detail::load_norm_sum<Traits>(params, row, i * kVecSize, h);
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) sum += h[j] * h[j];
  }
  sum = block_reduce_sum(sum, scratch, static_cast<int>(blockDim.x) / 32);
  const float inv_rms = rsqrtf(sum * params.inv_hidden_size + params.eps);
  // Whole warps run the same rounds, because groups use shuffles.
  for (uint32_t first = 0; first < num_vecs; first += blockDim.x) {
    const uint32_t i = first + threadIdx.x;
    Vector<T, kVecSize> weight;
    weight.clear();
    if (i < num_vecs) {
      detail::load_norm_sum<Traits>(params, row, i * kVecSize, h);
      weight.load(static_cast<const T*>(params.weight) + i * kVecSize);
    }
    detail::finish_norm<Traits>(params, row, i * kVecSize, i < num_vecs, h, weight, inv_rms);
  }
}

#ifndef __CUDACC_RTC__

template <typename Traits, bool kLoop>
inline auto fused_rmsnorm_kernel_for(int vecs_per_thread) -> void (*)(FusedRmsnormParams) {
  switch (vecs_per_thread) {
    case 1:
      return fused_rmsnorm_kernel<Traits, 1, kLoop>;
    case 2:
      return fused_rmsnorm_kernel<Traits, 2, kLoop>;
    default:
      return fused_rmsnorm_kernel<Traits, Traits::kMostVecs, kLoop>;
  }
}

// Each specialised row size costs 0.04 s of compile time, so only the usual sizes have one.
template <typename Traits, int kThreads = kCopiedThreads>
inline auto fused_rmsnorm_copied_kernel_for(uint32_t row_bytes) -> void (*)(FusedRmsnormParams) {
  if (row_bytes == kThreads * kCopiedBytesPerThread) {
    return fused_rmsnorm_copied_kernel<Traits, kThreads>;
  }
  if constexpr (kThreads > 128) {
    return fused_rmsnorm_copied_kernel_for<Traits, kThreads - 32>(row_bytes);
  }
  return fused_rmsnorm_copied_kernel<Traits, 0>;
}

// Groups require vectorizable rows.
template <typename Traits>
inline cudaError_t launch_fused_rmsnorm(FusedRmsnormParams params, const DeviceInfo& device,
                                        bool enable_pdl, cudaStream_t stream) {
  constexpr uint32_t kVecSize = Traits::kVecSize;
  params.inv_hidden_size = 1.f / static_cast<float>(params.hidden_size);
  const uint32_t num_rows = Traits::kGroups ? params.scale_rows : params.num_rows;
  const uint32_t num_vecs = params.hidden_size / kVecSize;
  if (!params.vectorizable || params.hidden_size * sizeof(typename Traits::T) > 16384) {
    void (*kernel)(FusedRmsnormParams) = fused_rmsnorm_looped_kernel<Traits, kVecSize>;
    if constexpr (!Traits::kGroups) {
      if (!params.vectorizable) kernel = fused_rmsnorm_looped_kernel<Traits, 1>;
    }
    const uint32_t threads =
        params.hidden_size < 1024 ? round_up(params.hidden_size, 32u)
        : params.hidden_size * sizeof(typename Traits::T) > 32768 || Traits::kAddResidual ? 1024
                                                                                          : 512;
    return launch_kernel(kernel, dim3(num_rows), dim3(threads), 0, stream, enable_pdl, params);
  }
  // Each row gets a warp, or a CTA with 32 bytes per thread. Few rows that are quantised get a CTA
  // with 16 bytes per thread: its time is that of one row (docs/tuning/fused_norm.md).
  const bool is_warp = num_vecs <= 32 * Traits::kMostVecs;
  const bool is_few =
      Traits::kGroups && num_rows <= static_cast<uint32_t>(device.num_sms) && num_vecs <= 512;
  const int vecs_of_cta = is_few ? 1 : Traits::kMostVecs / 2;
  const uint32_t threads = is_warp ? 32 : round_up(ceil_div<uint32_t>(num_vecs, vecs_of_cta), 32u);
  const int vecs = is_warp ? (num_vecs <= 32 ? 1 : num_vecs <= 64 ? 2 : 4) : vecs_of_cta;
  const uint32_t rows_per_cta = is_warp ? (num_vecs > 64 ? 2 : 4) : 1;
  const uint32_t num_steps = ceil_div(num_rows, rows_per_cta);
  const uint32_t threads_per_sm = is_warp ? 2048 : 1024;
  uint32_t steps_per_cta =
      ceil_div<uint32_t>(num_steps, device.num_sms * (threads_per_sm / (threads * rows_per_cta)));
  const uint32_t row_bytes = params.hidden_size * sizeof(typename Traits::T);
  params.rows_ahead = 0;
  if constexpr (!Traits::kAddResidual) {
    constexpr uint32_t kLeastSteps = Traits::kGroups || Traits::kRoundsTo8Bits ? 2 : 8;
    if (!is_warp && steps_per_cta >= kLeastSteps && device.has_copy_engine()) {
      const uint32_t rows_ahead = kCopiedBytesAhead / row_bytes;
      if (!Traits::kGroups && num_rows >= 4 * rows_ahead) params.rows_ahead = rows_ahead;
      const uint32_t copied_threads =
          round_up(ceil_div<uint32_t>(row_bytes, kCopiedBytesPerThread), 32u);
      return launch_kernel(fused_rmsnorm_copied_kernel_for<Traits>(row_bytes), dim3(num_rows),
                           dim3(copied_threads), row_bytes, stream, enable_pdl, params);
    }
  }
  if (!is_warp && steps_per_cta >= 32) {
    if (Traits::kAddResidual) {
      steps_per_cta = 1;
      params.rows_ahead = kResidualBytesAhead / row_bytes;
    } else if (!Traits::kGroups && sizeof(typename Traits::T) == 2) {
      steps_per_cta = 16;
    }
  }
  const bool loops = steps_per_cta > 1;
  const auto kernel = loops ? fused_rmsnorm_kernel_for<Traits, true>(vecs)
                            : fused_rmsnorm_kernel_for<Traits, false>(vecs);
  return launch_kernel(kernel, dim3(ceil_div(num_steps, steps_per_cta)),
                       dim3(threads, rows_per_cta), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
