// RMS norm over all heads of Q and of K (Zhang and Sennrich, "Root Mean Square Layer
// Normalization", 2019), then a rotary embedding (Su et al., "RoFormer", 2021) whose pairs rotate
// with the frame, the row or the column of a token; V is copied. One kernel turns the rows of a QKV
// projection into the operands of an attention, with 8-bit outputs if wanted.
//
// A CTA works on Q, K or V of one token at a time. A thread takes a unit, which is two vectors half
// a head apart, as in rope.cuh. The next token's vectors load while a CTA reduces, as in norm.cuh.
//
// Measurements, also of what lost: docs/tuning/fused_norm.md.
#pragma once

#include <flashinfer/collective/block_reduce.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/ptx/parameter.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/prefetch.cuh>
#include <flashinfer/rope/qk_norm_rope_params.h>
#include <flashinfer/rope/rope.cuh>

namespace flashinfer {

template <typename T_, typename TOut_, bool kInterleave_, bool kNorm_>
struct QkNormRopeTraits {
  using T = T_;
  using TOut = TOut_;
  static constexpr bool kInterleave = kInterleave_;
  static constexpr bool kNorm = kNorm_;
  static constexpr bool kScaleOutput = dtype::kIsFloat8<TOut>;
  static constexpr int kVecSize = 16 / sizeof(T);
};

namespace detail {

// Where a unit's two vectors begin in a row of the part, and which pairs they hold: in order or, if
// interleaved, first those of `first`, then those of `second`.
struct QkUnit {
  uint32_t first, second;
  uint32_t pairs_a, pairs_b;
  bool is_valid;
};

template <typename Traits, int kVecSize>
__device__ __forceinline__ QkUnit qk_unit(const QkNormRopeParams& params,
                                          const QkNormRopePart& part, uint32_t index) {
  const uint32_t half = params.head_dim / 2, units_per_head = half / kVecSize;
  const uint32_t head = index / units_per_head, unit = index - head * units_per_head;
  const uint32_t first = head * params.head_dim + unit * kVecSize;
  const bool is_valid = head < part.num_heads;
  const uint32_t pair = unit * kVecSize;
  if constexpr (!Traits::kInterleave) {
    return {first, first + half, pair, pair + kVecSize / 2, is_valid};
  }
  if constexpr (kVecSize == 1) return {first + unit, first + unit + 1, pair, pair, is_valid};
  return {first, first + half, pair / 2, (pair + half) / 2, is_valid};
}

// Cosines and sines of all pairs of a head; every head needs them.
__device__ __forceinline__ void compute_rotations(const QkNormRopeParams& params, uint32_t token,
                                                  float2* table) {
  const uint32_t line = params.columns.divide(token), picture = params.rows.divide(line);
  const uint32_t column = token - line * params.columns.divisor;
  const uint32_t row = line - picture * params.rows.divisor;
  const uint32_t frame = picture - params.frames.divide(picture) * params.frames.divisor;
  for (uint32_t pair = threadIdx.x; pair < params.head_dim / 2; pair += blockDim.x) {
    const uint32_t position = pair < params.frame_pairs ? frame
                              : pair < params.row_end   ? row
                                                        : column;
    const uint64_t turn = position * ptx::load_parameter(&params.frequencies.turns[pair]);
    // Read as a signed number, the upper half is in [-1/2, 1/2) turns, that is in [-1, 1) pi.
    const float half_turns = static_cast<float>(static_cast<int32_t>(turn >> 32)) * 0x1p-31f;
    float2 cos_sin;
    sincospif(half_turns, &cos_sin.y, &cos_sin.x);
    table[pair] = {cos_sin.x * params.attention_factor, cos_sin.y * params.attention_factor};
  }
}

template <int kVecSize>
__device__ __forceinline__ void load_rotation(const float2* table, const QkUnit& unit,
                                              Rotation<kVecSize>& rotation) {
  if constexpr (kVecSize == 1) {
    rotation.cos[0] = table[unit.pairs_a].x;
    rotation.sin[0] = table[unit.pairs_a].y;
  } else {
#pragma unroll
    for (int j = 0; j < kVecSize; j += 2) {
      const uint32_t pair = j < kVecSize / 2 ? unit.pairs_a + j : unit.pairs_b + j - kVecSize / 2;
      const float4 two = *reinterpret_cast<const float4*>(table + pair);
      rotation.cos[j] = two.x;
      rotation.sin[j] = two.y;
      rotation.cos[j + 1] = two.z;
      rotation.sin[j + 1] = two.w;
    }
  }
}

// Normalises, rotates and writes one unit.
template <typename Traits, int kVecSize>
__device__ __forceinline__ void finish_unit(const QkNormRopePart& part, bool is_v,
                                            const QkUnit& unit,
                                            const Vector<typename Traits::T, kVecSize> (&x)[2],
                                            const Vector<typename Traits::T, kVecSize> (&weight)[2],
                                            float inv_rms, const float2* table,
                                            typename Traits::TOut* out) {
  float y[2][kVecSize];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) y[half][j] = x[half][j];
  }
  if (!is_v) {
    if constexpr (Traits::kNorm) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) y[half][j] *= inv_rms * weight[half][j];
      }
    }
    Rotation<kVecSize> rotation;
    load_rotation<kVecSize>(table, unit, rotation);
    rotate<Traits>(y[0], y[1], rotation);
  }
  if constexpr (Traits::kScaleOutput) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) y[half][j] *= part.scale;
    }
  }
  Vector<typename Traits::TOut, kVecSize> rounded;
  rounded.from_floats(y[0]);
  rounded.store(out + unit.first);
  rounded.from_floats(y[1]);
  rounded.store(out + unit.second);
}

template <typename T, int kVecSize>
__device__ __forceinline__ void load_unit(Vector<T, kVecSize> (&x)[2], const T* row,
                                          const QkUnit& unit) {
  x[0] = {};
  x[1] = {};
  if (!unit.is_valid) return;
  x[0].load(row + unit.first);
  x[1].load(row + unit.second);
}

template <typename T, int kVecSize>
__device__ __forceinline__ float sum_of_squares(const Vector<T, kVecSize> (&x)[2]) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) sum += x[0][j] * x[0][j] + x[1][j] * x[1][j];
  return sum;
}

}  // namespace detail

inline constexpr int kQkNormRopeThreads = 512;

// Each of the CTA's threads holds kUnits units of the row. The grid has Q, K and V of a token in
// sequence, for as many tokens as run at a time. Shared memory holds two tables of rotations.
template <typename Traits, int kUnits>
__global__ void __launch_bounds__(kQkNormRopeThreads, kUnits == 1 ? 2 : 1)
    qk_norm_rope_kernel(const __grid_constant__ QkNormRopeParams params) {
  using T = typename Traits::T;
  using TOut = typename Traits::TOut;
  constexpr int kVecSize = Traits::kVecSize;
  extern __shared__ float4 rotation_tables[];
  __shared__ float scratch[2][32];
  const uint32_t which = blockIdx.x % QkNormRopeParams::kNumParts;
  const uint32_t token_step = gridDim.x / QkNormRopeParams::kNumParts;
  const QkNormRopePart& part = params.parts[which];
  const bool is_v = which == 2;
  const int64_t out_stride = int64_t{part.num_heads} * params.head_dim;
  const T* input = static_cast<const T*>(params.qkv) + part.first_column;

  detail::QkUnit units[kUnits];
  Vector<T, kVecSize> next[kUnits][2], weight[kUnits][2];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    units[i] = detail::qk_unit<Traits, kVecSize>(params, part, threadIdx.x + i * blockDim.x);
  }
  const auto load_row = [&](uint32_t token) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      detail::load_unit(next[i], input + token * params.qkv_stride, units[i]);
    }
  };
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  uint32_t token = blockIdx.x / QkNormRopeParams::kNumParts;
  load_row(token);
  if (Traits::kNorm && !is_v) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      detail::load_unit(weight[i], static_cast<const T*>(part.weight), units[i]);
    }
  }
  auto* tables = reinterpret_cast<float2*>(rotation_tables);
  if (!is_v && token < params.num_tokens) detail::compute_rotations(params, token, tables);
  for (uint32_t parity = 0; token < params.num_tokens; token += token_step, parity ^= 1) {
    if (params.tokens_ahead != 0 && threadIdx.x == 0 &&
        token + params.tokens_ahead < params.num_tokens) {
      ptx::prefetch_bulk_l2(input + (token + params.tokens_ahead) * params.qkv_stride,
                            part.num_heads * params.head_dim * sizeof(T));
    }
    Vector<T, kVecSize> x[kUnits][2];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      x[i][0] = next[i][0];
      x[i][1] = next[i][1];
    }
    if (token + token_step < params.num_tokens) load_row(token + token_step);
    const float2* table = tables + parity * (params.head_dim / 2);
    if (!is_v) {
      if constexpr (Traits::kNorm) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) sum += detail::sum_of_squares(x[i]);
        sum = block_reduce_sum(sum, scratch[parity], static_cast<int>(blockDim.x) / 32);
      }
      if (!Traits::kNorm || blockDim.x == 32) __syncthreads();
      // Computes the next token's table. It comes after this barrier, since by then every thread
      // has read the old entries, and before the next barrier.
      if (token + token_step < params.num_tokens) {
        detail::compute_rotations(params, token + token_step,
                                  tables + (parity ^ 1) * (params.head_dim / 2));
      }
    }
    const float inv_rms = rsqrtf(sum * part.inv_width + params.eps);
    TOut* out = static_cast<TOut*>(part.out) + token * out_stride;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (!units[i].is_valid) continue;
      detail::finish_unit<Traits, kVecSize>(part, is_v, units[i], x[i], weight[i], inv_rms, table,
                                            out);
    }
  }
}

// Kernel for rows of any length. Each CTA reads its row again after the sum; kVecSize 1 serves any
// alignment.
template <typename Traits, int kVecSize>
__global__ void __launch_bounds__(1024)
    qk_norm_rope_looped_kernel(const __grid_constant__ QkNormRopeParams params) {
  using T = typename Traits::T;
  using TOut = typename Traits::TOut;
  extern __shared__ float4 rotation_tables[];
  __shared__ float scratch[32];
  const uint32_t which = blockIdx.x % QkNormRopeParams::kNumParts;
  const uint32_t token = blockIdx.x / QkNormRopeParams::kNumParts;
  const QkNormRopePart& part = params.parts[which];
  const bool is_v = which == 2;
  const uint32_t num_units = part.num_heads * (params.head_dim / 2 / kVecSize);
  auto* table = reinterpret_cast<float2*>(rotation_tables);
  Vector<T, kVecSize> x[2], weight[2];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const T* row = static_cast<const T*>(params.qkv) + token * params.qkv_stride + part.first_column;
  float sum = 0.f;
  if (!is_v) {
    detail::compute_rotations(params, token, table);
    for (uint32_t i = threadIdx.x; Traits::kNorm && i < num_units; i += blockDim.x) {
      detail::load_unit(x, row, detail::qk_unit<Traits, kVecSize>(params, part, i));
      sum += detail::sum_of_squares(x);
    }
    if (Traits::kNorm) sum = block_reduce_sum(sum, scratch, static_cast<int>(blockDim.x) / 32);
    if (!Traits::kNorm || blockDim.x == 32) __syncthreads();
  }
  const float inv_rms = rsqrtf(sum * part.inv_width + params.eps);
  TOut* out = static_cast<TOut*>(part.out) + token * (int64_t{part.num_heads} * params.head_dim);
  for (uint32_t i = threadIdx.x; i < num_units; i += blockDim.x) {
    const detail::QkUnit unit = detail::qk_unit<Traits, kVecSize>(params, part, i);
    detail::load_unit(x, row, unit);
    if (Traits::kNorm && !is_v) {
      detail::load_unit(weight, static_cast<const T*>(part.weight), unit);
    }
    detail::finish_unit<Traits, kVecSize>(part, is_v, unit, x, weight, inv_rms, table, out);
  }
}

#ifndef __CUDACC_RTC__

// `vectorizable`: half a head, every row of every tensor and the first columns are whole, aligned
// vectors.
template <typename Traits>
inline cudaError_t launch_qk_norm_rope(QkNormRopeParams params, bool vectorizable, int num_sms,
                                       bool enable_pdl, cudaStream_t stream) {
  constexpr uint32_t kParts = QkNormRopeParams::kNumParts;
  constexpr uint32_t kVecSize = Traits::kVecSize;
  using T = typename Traits::T;
  uint32_t num_heads = 0;
  for (QkNormRopePart& part : params.parts) {
    if (part.num_heads > num_heads) num_heads = part.num_heads;
    part.inv_width = 1.f / static_cast<float>(part.num_heads * params.head_dim);
  }
  const uint32_t num_units = num_heads * (params.head_dim / 2 / (vectorizable ? kVecSize : 1));
  const size_t table_bytes = params.head_dim / 2 * sizeof(float2);
  if (!vectorizable || num_units > 2 * kQkNormRopeThreads) {
    const auto kernel = vectorizable ? qk_norm_rope_looped_kernel<Traits, kVecSize>
                                     : qk_norm_rope_looped_kernel<Traits, 1>;
    const uint32_t threads = num_units < 1024 ? round_up(num_units, 32u) : 1024;
    return launch_kernel(kernel, dim3(kParts * params.num_tokens), dim3(threads),
                         round_up<size_t>(table_bytes, 16), stream, enable_pdl, params);
  }
  const bool is_wide = num_units > kQkNormRopeThreads;
  const uint32_t threads = round_up(is_wide ? ceil_div(num_units, 2u) : num_units, 32u);
  // With few tokens there are as many CTAs as the SMs hold. With many a CTA takes two tokens, four
  // with 8-bit outputs, and prefetches later ones to L2, 4 MB or 2 MB ahead in memory.
  uint32_t steps = ceil_div<uint32_t>(kParts * params.num_tokens, num_sms * (1024 / threads));
  params.tokens_ahead = 0;
  if (steps >= 32) {
    constexpr uint32_t kBytesAhead = (Traits::kScaleOutput ? 2u : 4u) << 20;
    steps = Traits::kScaleOutput ? 4 : 2;
    params.tokens_ahead = kBytesAhead / (kParts * num_heads * params.head_dim * sizeof(T));
  }
  const auto kernel = is_wide ? qk_norm_rope_kernel<Traits, 2> : qk_norm_rope_kernel<Traits, 1>;
  return launch_kernel(kernel, dim3(kParts * ceil_div(params.num_tokens, steps)), dim3(threads),
                       2 * table_bytes, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
