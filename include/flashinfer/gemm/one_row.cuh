// A row times weights [k, n] that are read once: out = a b + bias. With a norm the row is that of
// the sum of `a` and a residual, which each CTA computes. What becomes of the product is the
// business of an `End`: it is stored, or finished by what would be the next kernel.
//
// A CTA has kColumns columns and a part of k, which the CTAs of a cluster divide. A thread has
// eight columns and every so many rows of b; it multiplies 16 bytes at a time in float, while the
// next kLoads such loads are on their way. Where the weights are ready, the first of them begin
// before the kernel before ends. Sums are added in a fixed order: of a warp's threads, of the
// warps, of the cluster's CTAs, which send theirs to the CTA that finishes a column.
//
// Measurements, also of what lost: docs/tuning/serving_step_few.md.
#pragma once

#include <cstdint>
#include <flashinfer/collective/block_reduce.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/set_shared.h>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/gemm/one_row_params.h>
#include <flashinfer/ptx/cluster.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

// Stores the product; the CTAs of a cluster have a share of the columns each. An `End` has
//
//   Params           OneRowParams, or derived from it
//   kByFirst         the first CTA of a cluster has all columns
//   kMostSplits      CTAs that divide k, a power of two: at most as many, and at most 16
//   kSharedBytes     of its own shared memory, a multiple of 16
//   prepare          called where weights may be loaded, if kByFirst by that CTA alone
//   finish           called with columns [first, first + share) in `received` [splits][share]
template <typename T>
struct OneRowStore {
  using Params = OneRowParams;
  static constexpr bool kByFirst = false;
  static constexpr uint32_t kMostSplits = 8;
  static constexpr uint32_t kSharedBytes = 0;

  __device__ __forceinline__ static void prepare(const Params&, uint32_t, char*) {}

  __device__ __forceinline__ static void finish(const Params& params, uint32_t first,
                                                uint32_t share, const float* received,
                                                uint32_t splits, char*) {
    for (uint32_t at = 2 * threadIdx.x; at < share; at += 2 * blockDim.x) {
      float y[2] = {};
      for (uint32_t s = 0; s < splits; ++s) {
        y[0] += received[s * share + at];
        y[1] += received[s * share + at + 1];
      }
      const uint32_t c = first + at;
      if (c >= params.n) continue;
      if (params.bias != nullptr) {
        Vector<T, 2> bias;
        bias.load(static_cast<const T*>(params.bias) + c);
        y[0] += bias[0];
        y[1] += bias[1];
      }
      Vector<T, 2> result;
      result.from_floats(y);
      result.store(static_cast<T*>(params.out) + c);
    }
  }
};

template <typename T_, int kColumns_, bool kNorm_ = false, typename End_ = OneRowStore<T_>>
struct OneRowTraits {
  using T = T_;
  using End = End_;
  static constexpr int kColumns = kColumns_;  // 64 or 128
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kLoads = 8;
  static constexpr int kWide = 8;                   // columns of a thread
  static constexpr int kAcross = kColumns / kWide;  // threads side by side
  static constexpr int kStep = kThreads / kAcross;  // rows of b that a CTA loads at once
  static constexpr int kChunk = kLoads * kStep;     // and those on their way
  static constexpr int kCtas = 3;                   // of an SM
  static constexpr bool kNorm = kNorm_;
  static constexpr int kNormLoads = 2;  // vectors of a thread: k is at most 4096 with a norm
};

// Sums that a CTA receives: of all of a cluster's columns, or of its share.
template <typename Traits>
inline constexpr uint32_t kOneRowReceived =
    (Traits::End::kByFirst ? Traits::End::kMostSplits : 1) * Traits::kColumns;

// For the sums of warps and CTAs, for the end, and for the part of `a`.
template <typename Traits>
inline constexpr uint32_t one_row_shared_bytes(uint32_t filled) {
  return filled * sizeof(typename Traits::T) + Traits::End::kSharedBytes +
         (Traits::kWarps * Traits::kColumns + kOneRowReceived<Traits>)*sizeof(float);
}

// A thread's part of the norm's weight.
template <typename Traits>
struct OneRowNormWeight {
  using T = typename Traits::T;
  Vector<T, Traits::kWide> part[Traits::kNormLoads];

  __device__ __forceinline__ void load(const OneRowParams& params) {
#pragma unroll
    for (int i = 0; i < Traits::kNormLoads; ++i) {
      const uint32_t at = Traits::kWide * (threadIdx.x + i * Traits::kThreads);
      if (at < params.k) part[i].load(static_cast<const T*>(params.norm_weight) + at);
    }
  }
};

// The norm of the sum with a residual, which every CTA computes; the first one writes both.
template <typename Traits>
__device__ __forceinline__ void one_row_norm(const OneRowParams& params,
                                             const OneRowNormWeight<Traits>& weight, float* scratch,
                                             typename Traits::T* part, uint32_t begin,
                                             uint32_t there) {
  using T = typename Traits::T;
  constexpr int kWide = Traits::kWide, kLoads = Traits::kNormLoads;
  constexpr uint32_t kStride = kWide * Traits::kThreads;
  const uint32_t first = kWide * threadIdx.x;
  Vector<T, kWide> x[kLoads], residual[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t at = first + i * kStride;
    x[i].clear();
    residual[i].clear();
    if (at >= params.k) continue;
    x[i].load(static_cast<const T*>(params.a) + at);
    residual[i].load(static_cast<const T*>(params.residual) + at);
  }
  for (uint32_t at = there + first; at < params.filled; at += kStride) {
    Vector<T, kWide> zero;
    zero.clear();
    zero.store(part + at);
  }
  float h[kLoads][kWide];
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      h[i][e] = x[i][e] + residual[i][e];
      squares = fmaf(h[i][e], h[i][e], squares);
    }
  }
  squares = block_reduce_sum(squares, scratch, Traits::kWarps);
  const float scale = rsqrtf(squares / static_cast<float>(params.k) + params.eps);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t at = first + i * kStride;
    if (at >= params.k) continue;
    float y[kWide];
#pragma unroll
    for (int e = 0; e < kWide; ++e) y[e] = h[i][e] * scale * weight.part[i][e];
    Vector<T, kWide> normed;
    normed.from_floats(y);
    if (at >= begin && at < begin + there) normed.store(part + at - begin);
    if (blockIdx.x == 0) {
      Vector<T, kWide> sum;
      sum.from_floats(h[i]);
      sum.store(static_cast<T*>(params.residual_out) + at);
      normed.store(static_cast<T*>(params.normed) + at);
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    one_row_kernel(const __grid_constant__ typename Traits::End::Params params) {
  using T = typename Traits::T;
  using End = typename Traits::End;
  constexpr int kWide = Traits::kWide, kLoads = Traits::kLoads;
  extern __shared__ __align__(128) char shared[];
  float* warp_sums = reinterpret_cast<float*>(shared);  // [kWarps][kColumns]
  float* received = warp_sums + Traits::kWarps * Traits::kColumns;
  char* const end_shared = reinterpret_cast<char*>(received + kOneRowReceived<Traits>);
  T* part = reinterpret_cast<T*>(end_shared + End::kSharedBytes);  // [filled]

  const uint32_t splits = ptx::cluster_size(), rank = ptx::cluster_rank();
  const uint32_t tile = blockIdx.x / splits, first_column = tile * Traits::kColumns;
  const uint32_t begin = rank * params.part;
  const uint32_t column = first_column + threadIdx.x % Traits::kAcross * kWide;
  const uint32_t own_row = threadIdx.x / Traits::kAcross;
  // Rows of b that are there, and are this thread's: none beyond the last column.
  const uint32_t there = begin < params.k ? min(params.part, params.k - begin) : 0;
  const uint32_t rows_left = column < params.n ? there : 0;
  const T* weights = static_cast<const T*>(params.b) + (begin + own_row) * params.b_stride + column;
  const int64_t step = Traits::kStep * params.b_stride;
  // Sums may be sent to CTAs that have begun.
  if (splits > 1) ptx::cluster_arrive_relaxed();

  Vector<T, kWide> loaded[kLoads];
  OneRowNormWeight<Traits> norm_weight;
  if (!params.weight_ready) ptx::grid_dependency_wait();
  if constexpr (Traits::kNorm) norm_weight.load(params);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    loaded[i].clear();
    if (own_row + i * Traits::kStep < rows_left) loaded[i].load_streaming(weights);
    weights += step;
  }
  if (!End::kByFirst || rank == 0) End::prepare(params, tile, end_shared);
  if (params.weight_ready) ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  if constexpr (Traits::kNorm) {
    one_row_norm<Traits>(params, norm_weight, warp_sums, part, begin, there);
  } else {
    // What is beyond the part is zero.
    for (uint32_t at = kWide * threadIdx.x; at < params.filled; at += kWide * Traits::kThreads) {
      Vector<T, kWide> x;
      x.clear();
      if (at < there) x.load(static_cast<const T*>(params.a) + begin + at);
      x.store(part + at);
    }
  }
  __syncthreads();

  float total[kWide] = {};
  for (uint32_t row = own_row; row < params.part; row += Traits::kChunk) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float w[kWide];
      loaded[i].to_floats(w);
      Vector<T, 1> x;
      x.load(part + row + i * Traits::kStep);
      if (row + i * Traits::kStep + Traits::kChunk < rows_left) {
        loaded[i].load_streaming(weights);
      } else {
        loaded[i].clear();
      }
      weights += step;
#pragma unroll
      for (int e = 0; e < kWide; ++e) total[e] = fmaf(x[0], w[e], total[e]);
    }
  }

#pragma unroll
  for (int e = 0; e < kWide; ++e) {
#pragma unroll
    for (int lane = Traits::kAcross; lane < 32; lane *= 2) {
      total[e] += __shfl_xor_sync(~0u, total[e], lane);
    }
  }
  if (threadIdx.x % 32 < Traits::kAcross) {
    float* mine = warp_sums + threadIdx.x / 32 * Traits::kColumns + column - first_column;
#pragma unroll
    for (int e = 0; e < kWide; ++e) mine[e] = total[e];
  }
  __syncthreads();
  if (splits > 1) ptx::cluster_wait();
  // The number of CTAs is a power of two.
  const uint32_t halvings = End::kByFirst ? 0 : __popc(splits - 1);
  const uint32_t share = Traits::kColumns >> halvings;
  for (uint32_t i = threadIdx.x; i < Traits::kColumns; i += Traits::kThreads) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) sum += warp_sums[w * Traits::kColumns + i];
    const uint32_t owner = (i << halvings) / Traits::kColumns;
    ptx::cluster_store(ptx::cluster_address(received + rank * share + (i & (share - 1)), owner),
                       sum);
  }
  if (splits > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  if (End::kByFirst && rank != 0) return;
  End::finish(params, End::kByFirst ? first_column : first_column + rank * share, share, received,
              splits, end_shared);
}

#ifndef __CUDACC_RTC__

// n and k are multiples of 8, rows begin at multiples of 16 bytes. cudaErrorInvalidValue if the
// part of `a` exceeds the shared memory, or if so many CTAs cannot divide k.
template <typename Traits>
inline cudaError_t launch_one_row(typename Traits::End::Params params, uint32_t splits,
                                  bool enable_pdl, cudaStream_t stream) {
  constexpr uint32_t kMostBytes = 113 << 10;  // of two CTAs on an SM
  if (splits == 0 || splits > Traits::End::kMostSplits || (splits & (splits - 1)) != 0) {
    return cudaErrorInvalidValue;
  }
  params.part = ceil_div<uint32_t>(params.k, Traits::kStep * splits) * Traits::kStep;
  params.filled = ceil_div<uint32_t>(params.part, Traits::kChunk) * Traits::kChunk;
  const uint32_t bytes = one_row_shared_bytes<Traits>(params.filled);
  if (bytes > kMostBytes) return cudaErrorInvalidValue;
  if (Traits::kNorm && params.k > Traits::kNormLoads * Traits::kWide * Traits::kThreads) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = one_row_kernel<Traits>;
  cudaError_t error = set_shared(reinterpret_cast<const void*>(kernel), bytes, Traits::kCtas);
  if (error == cudaSuccess && splits > 8) {
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  const uint32_t tiles = ceil_div<uint32_t>(params.n, Traits::kColumns);
  return launch_kernel(kernel, dim3(tiles * splits), dim3(Traits::kThreads), bytes, stream,
                       enable_pdl, params, splits > 1 ? splits : 0);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
