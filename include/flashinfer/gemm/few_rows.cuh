// Up to 8 rows times weights [k, n] that are read once. FewRowsOutput says what becomes of the
// sums.
//
// A CTA has kColumns columns, with a gate half of them from each half of b, and a part of k. Its
// warps take blocks of 16 rows of b in turn, each on its own: a thread loads eight columns of four
// rows into registers and pairs what stands below each other, which makes the operand of the
// tensor cores with the columns in an order of its own. kDepth such blocks are on their way to each
// warp; where the weights are ready, the first ones begin before the kernel before ends. Sums are
// added in a fixed order: of the CTA's warps, then of the CTAs that divide k. These are a cluster,
// or leave their sums to the kernel of the norm.
//
// Measurements, also of what lost: docs/tuning/serving_step_few.md.
#pragma once

#include <cstdint>
#include <flashinfer/collective/block_reduce.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/set_shared.h>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/gemm/few_rows_params.h>
#include <flashinfer/ptx/cluster.cuh>
#include <flashinfer/ptx/mma.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename T_, int kColumns_, FewRowsOutput kOutput_>
struct FewRowsTraits {
  using T = T_;
  static constexpr FewRowsOutput kOutput = kOutput_;
  static constexpr int kRows = 8;
  static constexpr int kColumns = kColumns_;    // 64 or 128
  static constexpr int kSpans = kColumns / 64;  // of 64 columns, eight of a thread
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlock = 16;         // rows of b of a product
  static constexpr int kDepth = 2;          // blocks on their way to a warp
  static constexpr int kCtas = 4 - kSpans;  // of an SM
  static constexpr int kSums = kRows * kColumns;
  // Sums of each warp, and of all.
  static constexpr uint32_t kSharedBytes = (kWarps + 1) * kSums * sizeof(float);
  static_assert(kOutput != FewRowsOutput::kGated || kSpans == 2, "a span of gates, one of values");
};

// A thread's part of a block: with g = lane / 4 and t = lane % 4, columns 8 g.. of each span in
// rows 4 t.. of b, and elements 4 t.. of row g of a.
template <typename Traits>
struct FewRowsBlock {
  using T = typename Traits::T;
  Vector<T, 8> b[Traits::kSpans][4];
  Vector<T, 4> a;

  __device__ __forceinline__ void load_b(const T* from, int64_t stride, int64_t span) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int s = 0; s < Traits::kSpans; ++s) b[s][r].load_streaming(from + r * stride + s * span);
    }
  }

  // A row that is not there is zero.
  __device__ __forceinline__ void load_a(const T* from, bool there) {
    a.clear();
    if (there) a.load(from);
  }

  // Rows 4 t, 4 t + 1 stand for the operand's rows 2 t, 2 t + 1, and the others for 2 t + 8,
  // 2 t + 9. Columns 8 g + 2 j and 8 g + 2 j + 1 are columns g and g + 8 of product j.
  __device__ __forceinline__ void multiply(float (&sums)[Traits::kSpans][4][4]) const {
#pragma unroll
    for (int s = 0; s < Traits::kSpans; ++s) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t pair[4], words[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) words[r] = (&b[s][r].words[0].x)[j];
        pair[0] = __byte_perm(words[0], words[1], 0x5410);
        pair[1] = __byte_perm(words[0], words[1], 0x7632);
        pair[2] = __byte_perm(words[2], words[3], 0x5410);
        pair[3] = __byte_perm(words[2], words[3], 0x7632);
        ptx::mma_m16n8k16<T>(sums[s][j], pair, a.words[0].x, a.words[0].y);
      }
    }
  }
};

// Results of a CTA from the sums of all CTAs of the cluster, [kRows][kColumns] each: four columns
// of a row at a time.
template <typename Traits>
__device__ __forceinline__ void store_few_rows(const FewRowsParams& params, float* sums,
                                               uint32_t first_column, uint32_t rank) {
  using T = typename Traits::T;
  constexpr uint32_t kAcross = Traits::kColumns / 4;
  for (uint32_t i = rank + params.splits * threadIdx.x; i < params.m * kAcross;
       i += params.splits * Traits::kThreads) {
    const uint32_t row = i / kAcross, column = first_column + i % kAcross * 4;
    float y[4] = {};
    for (uint32_t s = 0; s < params.splits; ++s) {
      const uint32_t at = ptx::cluster_address(sums + 4 * i, s);
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const uint64_t both = ptx::cluster_load_u64(at + e * sizeof(float));
        y[e] += __uint_as_float(static_cast<uint32_t>(both));
        y[e + 1] += __uint_as_float(static_cast<uint32_t>(both >> 32));
      }
    }
    if (params.bias != nullptr) {
      Vector<T, 2> bias[2];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e % 2 == 0) bias[e / 2].load(static_cast<const T*>(params.bias) + column + e);
        y[e] += bias[e / 2][e % 2];
      }
    }
    Vector<T, 4> result;
    result.from_floats(y);
    result.store(static_cast<T*>(params.out) + row * params.out_stride + column);
  }
}

// 64 gates and 64 values of a row are adjacent.
template <typename Traits>
__device__ __forceinline__ void store_gated_rows(const FewRowsParams& params, const float* sums,
                                                 uint32_t first_column) {
  using T = typename Traits::T;
  for (uint32_t i = threadIdx.x; i < params.m * 16; i += Traits::kThreads) {
    const uint32_t row = i / 16, column = i % 16 * 4;
    Vector<float, 4> gate, value;
    gate.load(sums + row * Traits::kColumns + column);
    value.load(sums + row * Traits::kColumns + 64 + column);
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = gate[e] / (1.f + expf(-gate[e])) * value[e];
    Vector<T, 4> result;
    result.from_floats(y);
    result.store(static_cast<T*>(params.out) + row * params.out_stride + first_column + column);
  }
}

// Sums of this part of k, for the norm.
template <typename Traits>
__device__ __forceinline__ void store_part(const FewRowsParams& params, const float* sums,
                                           uint32_t first_column, uint32_t rank) {
  constexpr uint32_t kAcross = Traits::kColumns / 4;
  for (uint32_t i = threadIdx.x; i < params.m * kAcross; i += Traits::kThreads) {
    Vector<float, 4> four;
    four.load(sums + 4 * i);
    const int64_t row = static_cast<int64_t>(rank) * params.m + i / kAcross;
    four.store(params.parts + row * params.n + first_column + i % kAcross * 4);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    few_rows_kernel(const __grid_constant__ FewRowsParams params) {
  using T = typename Traits::T;
  constexpr int kDepth = Traits::kDepth, kSpans = Traits::kSpans;
  constexpr uint32_t kStep = Traits::kWarps * Traits::kBlock;  // rows of b that a CTA loads at once
  extern __shared__ __align__(128) char shared[];
  float* warp_sums = reinterpret_cast<float*>(shared);       // [kWarps][kSums]
  float* sums = warp_sums + Traits::kWarps * Traits::kSums;  // [kRows][kColumns]

  constexpr bool kGated = Traits::kOutput == FewRowsOutput::kGated;
  const uint32_t rank = blockIdx.x % params.splits;
  const uint32_t first_column = blockIdx.x / params.splits * (kGated ? 64 : Traits::kColumns);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t begin = rank * params.part, end = min(begin + params.part, params.k);
  const uint32_t blocks = begin < end ? (end - begin) / Traits::kBlock : 0;
  const uint32_t count = blocks > warp ? ceil_div<uint32_t>(blocks - warp, Traits::kWarps) : 0;
  const uint32_t row = begin + warp * Traits::kBlock + 4 * t;
  const T* b = static_cast<const T*>(params.b) + row * params.b_stride + first_column + 8 * g;
  const T* a = static_cast<const T*>(params.a) + g * params.a_stride + row;
  const int64_t step = kStep * params.b_stride, span = kGated ? params.n / 2 : 64;

  FewRowsBlock<Traits> loaded[kDepth];
  const auto load_b = [&](int d) {
    loaded[d].load_b(b, params.b_stride, span);
    b += step;
  };
  const auto load_a = [&](int d) {
    loaded[d].load_a(a, g < params.m);
    a += kStep;
  };
  if (!params.weight_ready) ptx::grid_dependency_wait();
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    if (d < count) load_b(d);
  }
  if (params.weight_ready) ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    if (d < count) load_a(d);
  }
  float products[kSpans][4][4] = {};
  for (uint32_t i = 0; i < count; i += kDepth) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (i + d >= count) break;
      loaded[d].multiply(products);
      if (i + d + kDepth < count) {
        load_b(d);
        load_a(d);
      }
    }
  }

  // In an order that keeps the lanes of a warp in different banks: [column % 8][span][g][row].
  float* mine = warp_sums + warp * Traits::kSums;
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      Vector<float, 2> both;
      both.elements[0] = products[s][c / 2][c % 2 * 2];
      both.elements[1] = products[s][c / 2][c % 2 * 2 + 1];
      both.store(mine + ((c * kSpans + s) * 8 + g) * 8 + 2 * t);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < Traits::kSums; i += Traits::kThreads) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) sum += warp_sums[w * Traits::kSums + i];
    const int column = i / 64 % kSpans * 64 + i / 8 % 8 * 8 + i / (64 * kSpans);
    sums[i % 8 * Traits::kColumns + column] = sum;
  }
  const bool is_cluster = Traits::kOutput == FewRowsOutput::kProduct && params.splits > 1;
  if (is_cluster) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  if constexpr (kGated) {
    store_gated_rows<Traits>(params, sums, first_column);
  } else if constexpr (Traits::kOutput == FewRowsOutput::kNorm) {
    store_part<Traits>(params, sums, first_column, rank);
  } else {
    store_few_rows<Traits>(params, sums, first_column, rank);
  }
  if (is_cluster) {  // the others may still read this CTA's sums
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

inline constexpr uint32_t kFewRowsNormVec = 8;
inline constexpr uint32_t kFewRowsNormThreads = 512;  // at most
inline constexpr uint32_t kFewRowsMostParts = 8;

// A CTA adds up a row's parts, in their order, and the residual; a thread has eight columns.
template <typename T>
__global__ void __launch_bounds__(kFewRowsNormThreads, 2)
    few_rows_norm_kernel(const __grid_constant__ FewRowsParams params) {
  constexpr int kVec = kFewRowsNormVec;
  constexpr uint32_t kBatch = 4;  // parts that a thread loads at once
  __shared__ float scratch[32];
  const uint32_t row = blockIdx.x, column = threadIdx.x * kVec;
  Vector<T, kVec> weight, residual;
  if (params.weight_ready) weight.load(static_cast<const T*>(params.norm_weight) + column);
  ptx::grid_launch_and_wait();
  if (!params.weight_ready) weight.load(static_cast<const T*>(params.norm_weight) + column);
  T* sum_row = static_cast<T*>(params.residual) + row * params.residual_stride;
  residual.load(sum_row + column);
  float h[kVec] = {};
#pragma unroll
  for (uint32_t first = 0; first < kFewRowsMostParts; first += kBatch) {
    Vector<float, kVec> parts[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const int64_t at = static_cast<int64_t>(first + i) * params.m + row;
      parts[i].clear();
      if (first + i < params.splits) parts[i].load(params.parts + at * params.n + column);
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) h[e] += parts[i][e];
    }
  }
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    h[e] += residual[e];
    squares = fmaf(h[e], h[e], squares);
  }
  Vector<T, kVec> sum;
  sum.from_floats(h);
  sum.store(sum_row + column);
  squares = block_reduce_sum(squares, scratch, blockDim.x / 32);
  const float scale = rsqrtf(squares / static_cast<float>(params.n) + params.eps);
#pragma unroll
  for (int e = 0; e < kVec; ++e) h[e] *= scale * weight[e];
  Vector<T, kVec> normed;
  normed.from_floats(h);
  normed.store(static_cast<T*>(params.out) + row * params.out_stride + column);
}

#ifndef __CUDACC_RTC__

inline constexpr int kFewRowsPercent = 44;  // 100 KB of an SM, as measured best

// n is a multiple of kColumns and k of 16; rows begin at multiples of 16 bytes; `splits` is at most
// 8, with a gate 1. With a norm, n is a multiple of 256 and at most 4096.
template <typename Traits>
inline cudaError_t launch_few_rows(FewRowsParams params, bool enable_pdl, cudaStream_t stream) {
  constexpr bool kIsNorm = Traits::kOutput == FewRowsOutput::kNorm;
  params.part = ceil_div<uint32_t>(params.k, Traits::kBlock * params.splits) * Traits::kBlock;
  const auto kernel = few_rows_kernel<Traits>;
  cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
  if (error != cudaSuccess) return error;
  error = set_shared_percent(reinterpret_cast<const void*>(kernel), kFewRowsPercent);
  if (error != cudaSuccess) return error;
  const uint32_t cluster = kIsNorm || params.splits == 1 ? 0 : params.splits;
  error = launch_kernel(kernel, dim3(params.n / Traits::kColumns * params.splits),
                        dim3(Traits::kThreads), Traits::kSharedBytes, stream, enable_pdl, params,
                        cluster);
  if (error != cudaSuccess || !kIsNorm) return error;
  return launch_kernel(few_rows_norm_kernel<typename Traits::T>, dim3(params.m),
                       dim3(params.n / kFewRowsNormVec), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
