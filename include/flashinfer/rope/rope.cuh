// Rotary position embedding (Su et al., "RoFormer", 2021), out of place or in place, with an
// optional 8-bit output, an optional paged cache as the destination of K and V, and there an
// optional RMS norm of each head before:
//
//   (x_a, x_b) <- (x_a cos - x_b sin, x_b cos + x_a sin)        angle = position * frequency_j
//
// Pair j is (x_j, x_{j + rope_dim / 2}), or (x_{2j}, x_{2j + 1}) if interleaved. A thread takes
// kVecSize pairs, that is two vectors (a "unit"), of one token and of one or two heads, which share
// the angles. A CTA works on one segment (the heads of Q, of K, ...), whose threads are numbered by
// unit, then head, then token. Each element is read and written by one thread, after all of that
// thread's reads, so the kernel works in place.
//
// Measurements, also of what lost: docs/tuning/rope_page_merge.md.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/layout/page_table.cuh>
#include <flashinfer/ptx/parameter.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/prefetch.cuh>
#include <flashinfer/rope/rope_params.h>
#include <type_traits>

namespace flashinfer {

// TCache is the element type of the cos-sin cache; with void, angles are computed. With kKeepsRows
// only what goes to the paged cache has type TOut, and heads may have a norm.
template <typename T_, typename TOut_, typename TCache_, bool kInterleave_, bool kAppend_,
          bool kKeepsRows_ = false>
struct RopeTraits {
  using T = T_;
  using TOut = TOut_;
  using TCache = TCache_;
  static constexpr bool kComputed = std::is_void_v<TCache>;
  static constexpr bool kInterleave = kInterleave_;
  static constexpr bool kAppend = kAppend_;
  static constexpr bool kKeepsRows = kKeepsRows_;
  using TRow = std::conditional_t<kKeepsRows, T, TOut>;  // of what stays out of the cache
  static constexpr bool kScaleCache = kKeepsRows || dtype::kIsFloat8<TOut>;
  using Params = std::conditional_t<kComputed, ComputedRopeParams, RopeParams>;
};

namespace detail {

// The thread's two vectors, as element offsets into the head's part of a segment, and the first of
// the kVecSize / 2 pairs (or the one pair) for the first and for the second half of its angles.
struct RopeUnit {
  uint32_t first, second;
  uint32_t pairs_a, pairs_b;
  bool has_second;
};

template <typename Traits, int kVecSize>
__device__ __forceinline__ RopeUnit rope_unit(const RopeSegment& segment, uint32_t unit) {
  const uint32_t first = unit * kVecSize, half = segment.dim / 2;
  if (!segment.rotates) {
    const uint32_t second = first + segment.units.divisor * kVecSize;
    return {first, second, 0, 0, second < segment.dim};
  }
  if constexpr (!Traits::kInterleave)
    return {first, first + half, first, first + kVecSize / 2, true};
  if constexpr (kVecSize == 1) return {2 * unit, 2 * unit + 1, unit, unit, true};
  // Each vector holds whole pairs. The two vectors are far apart so that a warp reads without gaps.
  return {first, first + half, first / 2, (first + half) / 2, true};
}

// Sequence position of a token, given by pos_ids or by its request. A token without a request is at
// position 0, where the rotation is the identity.
__device__ __forceinline__ int64_t rope_position(const RopeParams& params, uint32_t token,
                                                 uint32_t request) {
  if (params.pos_ids == nullptr) {
    while (request < params.batch_size &&
           static_cast<int32_t>(token) >= params.indptr[request + 1]) {
      ++request;
    }
    if (request >= params.batch_size || static_cast<int32_t>(token) < params.indptr[request])
      return 0;
    return static_cast<int64_t>(params.offsets[request]) + token - params.indptr[request];
  }
  return params.pos_ids_are_64_bit ? static_cast<const int64_t*>(params.pos_ids)[token]
                                   : static_cast<const int32_t*>(params.pos_ids)[token];
}

// Request of `token`: the number of entries of indptr[1 .. batch_size] that are at most `token`.
// The result is batch_size if it has none. All lanes of the warp call together.
__device__ __forceinline__ uint32_t request_of(const RopeParams& params, uint32_t token) {
  uint32_t count = 0;
  for (uint32_t first = 0; first < params.batch_size; first += 32) {
    const uint32_t i = first + threadIdx.x % 32;
    count += __popc(__ballot_sync(
        ~0u, i < params.batch_size && params.indptr[i + 1] <= static_cast<int32_t>(token)));
  }
  return count;
}

template <int kVecSize>
struct Rotation {
  float cos[kVecSize], sin[kVecSize];
};

// Loads pairs first_pair ... of a position's row; NaN for a position outside the cache, so that it
// does not go unnoticed.
template <typename TCache, int kVecSize>
__device__ __forceinline__ void load_rotation(const RopeParams& params, int64_t position,
                                              const RopeUnit& unit, Rotation<kVecSize>& rotation) {
  if (static_cast<uint64_t>(position) >= static_cast<uint64_t>(params.cache_rows)) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      rotation.cos[j] = rotation.sin[j] = __uint_as_float(0x7fc00000u);
    }
    return;
  }
  constexpr int kHalf = kVecSize > 1 ? kVecSize / 2 : 1;
  const TCache* row =
      static_cast<const TCache*>(params.cos_sin_cache) + position * params.cos_sin_stride;
#pragma unroll
  for (int first = 0; first < kVecSize; first += kHalf) {
    const uint32_t pair = first == 0 ? unit.pairs_a : unit.pairs_b;
    Vector<TCache, kHalf> cos, sin;
    cos.load(row + pair);
    sin.load(row + params.rope_dim / 2 + pair);
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      rotation.cos[first + j] = cos[j];
      rotation.sin[first + j] = sin[j];
    }
  }
}

// Computes cosines and sines of tokens first_token ... last_token, [tokens][num_pairs]. All heads
// of the warp need them, so its lanes share the work.
__device__ __forceinline__ void compute_rotations(const ComputedRopeParams& params,
                                                  uint32_t first_token, uint32_t last_token,
                                                  float2* table) {
  const uint32_t num_pairs = params.rope_dim / 2;
  uint32_t request = 0;
  if (params.pos_ids == nullptr) request = request_of(params, first_token);
  for (uint32_t token = first_token; token <= last_token; ++token) {
    const uint64_t position = static_cast<uint64_t>(rope_position(params, token, request));
    for (uint32_t pair = threadIdx.x % 32; pair < num_pairs; pair += 32) {
      const uint64_t turn = position * ptx::load_parameter(&params.frequencies.turns[pair]);
      // Read as a signed number, the upper half is in [-1/2, 1/2) turns, that is in [-1, 1) pi.
      const float half_turns = static_cast<float>(static_cast<int32_t>(turn >> 32)) * 0x1p-31f;
      float2 cos_sin;
      sincospif(half_turns, &cos_sin.y, &cos_sin.x);
      table[(token - first_token) * num_pairs + pair] = cos_sin;
    }
  }
  __syncwarp();
}

template <typename Traits, int kVecSize>
__device__ __forceinline__ void rotate(float (&a)[kVecSize], float (&b)[kVecSize],
                                       const Rotation<kVecSize>& rotation) {
  if constexpr (!Traits::kInterleave) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      const float x = a[j], y = b[j];
      a[j] = x * rotation.cos[j] - y * rotation.sin[j];
      b[j] = y * rotation.cos[j] + x * rotation.sin[j];
    }
  } else if constexpr (kVecSize == 1) {
    const float x = a[0], y = b[0];
    a[0] = x * rotation.cos[0] - y * rotation.sin[0];
    b[0] = y * rotation.cos[0] + x * rotation.sin[0];
  } else {
    // The pairs of `a` come first, then those of `b`.
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      float (&v)[kVecSize] = j < kVecSize / 2 ? a : b;
      const int i = 2 * j % kVecSize;
      const float x = v[i], y = v[i + 1];
      v[i] = x * rotation.cos[j] - y * rotation.sin[j];
      v[i + 1] = y * rotation.cos[j] + x * rotation.sin[j];
    }
  }
}

// The RMS norm of a head, whose threads are `units` neighbours: a power of two, at most a warp.
template <typename T, int kVecSize>
__device__ __forceinline__ void normalize_head(float (&a)[kVecSize], float (&b)[kVecSize],
                                               const Vector<T, kVecSize>& weight_a,
                                               const Vector<T, kVecSize>& weight_b, uint32_t units,
                                               float eps) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) sum += a[j] * a[j] + b[j] * b[j];
  // Other heads of the warp may be beyond the last one, and have left.
  const uint32_t all = units == 32 ? ~0u : (1u << units) - 1;
  const uint32_t mask = all << (threadIdx.x % 32 / units * units);
  for (uint32_t offset = units / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(mask, sum, offset);
  }
  const float factor = rsqrtf(sum / (2 * kVecSize * units) + eps);
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) {
    a[j] *= factor * weight_a[j];
    b[j] *= factor * weight_b[j];
  }
}

// The thread's two vectors of each of its heads, to its rows of type TOut.
template <bool kScale, typename TOut, int kVecSize, int kHeads>
__device__ __forceinline__ void store_heads(TOut* out, const RopeSegment& segment,
                                            const RopeUnit& unit, uint32_t num_heads,
                                            const float (&a)[kHeads][kVecSize],
                                            const float (&b)[kHeads][kVecSize]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= num_heads) break;
    float y_a[kVecSize], y_b[kVecSize];
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      y_a[j] = a[h][j];
      y_b[j] = b[h][j];
      if constexpr (kScale) {
        y_a[j] *= segment.scale;
        y_b[j] *= segment.scale;
      }
    }
    Vector<TOut, kVecSize> out_a, out_b;
    out_a.from_floats(y_a);
    out_b.from_floats(y_b);
    TOut* out_head = out + h * segment.out.stride_head;
    out_a.store_streaming(out_head + unit.first);
    if (unit.has_second) out_b.store_streaming(out_head + unit.second);
  }
}

template <typename T>
__device__ __forceinline__ T* rope_row(const RopeRows& rows, uint32_t token, uint32_t head) {
  return static_cast<T*>(rows.data) + token * rows.stride_token + head * rows.stride_head;
}

}  // namespace detail

// Threads of a CTA. Two heads per thread share their angles. The data is loaded before the angles,
// and a table of computed angles belongs to a warp.
//
// Rows of the first wave are prefetched to L2 while the preceding grid ends. A long grid lets the
// next one start when its last CTAs write; a short grid at once.
template <typename Traits, int kHeads>
inline constexpr int kRopeThreads = kHeads == 1 ? 128 : 64;
inline constexpr uint32_t kRopePrefetchCtas = 2048;

template <typename Traits, int kVecSize, int kHeads>
__global__ void __launch_bounds__(kRopeThreads<Traits, kHeads>)
    rope_kernel(const __grid_constant__ typename Traits::Params params) {
  using T = typename Traits::T;
  static_assert(!Traits::kKeepsRows || (Traits::kAppend && !Traits::kComputed));
  constexpr int kThreads = kRopeThreads<Traits, kHeads>;
  extern __shared__ float2 rotations[];
  int which = 0;
  while (which + 1 < static_cast<int>(params.num_segments) &&
         blockIdx.x >= params.segments[which + 1].first_cta) {
    ++which;
  }
  const RopeSegment& segment = params.segments[which];
  const uint32_t cta = blockIdx.x - segment.first_cta;
  const uint32_t index = cta * kThreads + threadIdx.x;
  const uint32_t row = segment.units.divide(index);
  const uint32_t unit_idx = index - row * segment.units.divisor;
  const uint32_t token_in_chunk = segment.head_groups.divide(row);
  const uint32_t head = (row - token_in_chunk * segment.head_groups.divisor) * kHeads;
  const uint32_t chunk = blockIdx.y * params.tokens_per_chunk;
  const uint32_t token = chunk + token_in_chunk;
  const detail::RopeUnit unit = detail::rope_unit<Traits, kVecSize>(segment, unit_idx);
  const bool is_valid = token_in_chunk < params.tokens_per_chunk && token < params.num_tokens;
  const auto has_head = [&](int h) { return h == 0 || head + h < segment.num_heads; };
  const T* in = detail::rope_row<const T>(segment.in, token, head);
  if (blockIdx.x < kRopePrefetchCtas && is_valid) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const T* in_head = in + h * segment.in.stride_head;
      if (has_head(h)) ptx::prefetch_l2(in_head + unit.first);
      if (has_head(h) && unit.has_second) ptx::prefetch_l2(in_head + unit.second);
    }
  }
  const bool is_long = gridDim.x > kRopePrefetchCtas;
  if (is_long) {
    ptx::grid_dependency_wait();
  } else {
    ptx::grid_launch_and_wait();
  }

  Vector<T, kVecSize> a[kHeads], b[kHeads];
  const auto load = [&] {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const T* in_head = in + h * segment.in.stride_head;
      if (has_head(h)) a[h].load_streaming(in_head + unit.first);
      if (has_head(h) && unit.has_second) b[h].load_streaming(in_head + unit.second);
    }
  };
  Vector<T, kVecSize> weight_a, weight_b;
  if constexpr (Traits::kKeepsRows && kVecSize > 1) {
    if (is_valid && segment.norm_weight != nullptr) {
      weight_a.load(static_cast<const T*>(segment.norm_weight) + unit.first);
      weight_b.load(static_cast<const T*>(segment.norm_weight) + unit.second);
    }
  }
  PageSlot slot{0, 0, false};
  detail::Rotation<kVecSize> rotation;
  uint32_t first_token = 0;  // first token of the warp
  float2* table = rotations + threadIdx.x / 32 * params.rotations_per_warp;
  if constexpr (Traits::kComputed) {
    if (segment.rotates) {
      const auto token_of = [&](uint32_t thread) {
        const uint32_t row = segment.units.divide(cta * kThreads + thread);
        const uint32_t token = chunk + segment.head_groups.divide(row);
        return token < params.num_tokens ? token : params.num_tokens - 1;
      };
      const uint32_t first_thread = threadIdx.x / 32 * 32;
      first_token = token_of(first_thread);
      detail::compute_rotations(params, first_token, token_of(first_thread + 31), table);
    }
  }
  if (!is_valid) return;
  if constexpr (Traits::kComputed) {
    load();
    if (segment.rotates) {
      const float2* row_of_token = table + (token - first_token) * (params.rope_dim / 2);
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        const float2 cos_sin =
            row_of_token[j < (kVecSize + 1) / 2 ? unit.pairs_a + j
                                                : unit.pairs_b + j - kVecSize / 2];
        rotation.cos[j] = cos_sin.x;
        rotation.sin[j] = cos_sin.y;
      }
    }
  } else {
    // Rows are kept in steps of few tokens, which wait for chains of loads: the longest one first.
    if constexpr (Traits::kKeepsRows) {
      load();
      if (segment.appends) slot = find_slot(params.table, token);
    }
    if (segment.rotates) {
      detail::load_rotation<typename Traits::TCache>(
          params, detail::rope_position(params, token, 0), unit, rotation);
    }
    if constexpr (!Traits::kKeepsRows) load();
  }
  float y_a[kHeads][kVecSize], y_b[kHeads][kVecSize];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (!has_head(h)) break;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      y_a[h][j] = a[h][j];
      y_b[h][j] = b[h][j];
    }
    if constexpr (Traits::kKeepsRows && kVecSize > 1) {
      if (segment.norm_weight != nullptr) {
        detail::normalize_head(y_a[h], y_b[h], weight_a, weight_b, segment.units.divisor,
                               params.norm_eps);
      }
    }
    if (segment.rotates) detail::rotate<Traits>(y_a[h], y_b[h], rotation);
  }
  const uint32_t num_heads = segment.num_heads - head;
  if constexpr (Traits::kAppend) {
    if (segment.appends) {
      if constexpr (!Traits::kKeepsRows) slot = find_slot(params.table, token);
      if (is_long) ptx::grid_launch_dependents();
      if (!slot.exists) return;
      auto* out = detail::rope_row<typename Traits::TOut>(segment.out, slot.slot, head) +
                  slot.page * segment.out.stride_page;
      detail::store_heads<Traits::kScaleCache>(out, segment, unit, num_heads, y_a, y_b);
      return;
    }
  }
  if (is_long) ptx::grid_launch_dependents();
  auto* out = detail::rope_row<typename Traits::TRow>(segment.out, token, head);
  detail::store_heads<dtype::kIsFloat8<typename Traits::TRow>>(out, segment, unit, num_heads, y_a,
                                                               y_b);
}

#ifndef __CUDACC_RTC__

// `vectorizable`: the rows of every segment and of the cos-sin cache are whole, aligned vectors.
template <typename Traits>
inline cudaError_t launch_rope(typename Traits::Params params, bool vectorizable, bool enable_pdl,
                               cudaStream_t stream) {
  constexpr uint32_t kVecSize = 16 / sizeof(typename Traits::T);
  constexpr uint32_t kMaxIndex = 1u << 30;  // per thread: FastDivisor takes 31 bits
  const uint32_t vec_size = vectorizable ? kVecSize : 1, heads = vectorizable ? 2 : 1;
  const uint32_t threads = vectorizable ? kRopeThreads<Traits, 2> : kRopeThreads<Traits, 1>;
  uint64_t max_threads_per_token = 1;
  uint32_t max_tokens_per_warp = 0;
  for (uint32_t i = 0; i < params.num_segments; ++i) {
    RopeSegment& segment = params.segments[i];
    segment.units = FastDivisor(ceil_div(segment.dim, 2 * vec_size));
    segment.head_groups = FastDivisor(ceil_div(segment.num_heads, heads));
    const uint64_t threads_per_token =
        uint64_t{segment.units.divisor} * segment.head_groups.divisor;
    if (threads_per_token > kMaxIndex) return cudaErrorInvalidValue;
    if (threads_per_token > max_threads_per_token) max_threads_per_token = threads_per_token;
    const uint32_t tokens = ceil_div<uint64_t>(31, threads_per_token) + 1;
    if (segment.rotates && tokens > max_tokens_per_warp) max_tokens_per_warp = tokens;
  }
  const uint32_t max_tokens = static_cast<uint32_t>(kMaxIndex / max_threads_per_token);
  params.tokens_per_chunk = params.num_tokens < max_tokens ? params.num_tokens : max_tokens;
  uint32_t num_ctas = 0;
  for (uint32_t i = 0; i < params.num_segments; ++i) {
    RopeSegment& segment = params.segments[i];
    segment.first_cta = num_ctas;
    num_ctas += ceil_div<uint32_t>(
        params.tokens_per_chunk * segment.units.divisor * segment.head_groups.divisor, threads);
  }
  const dim3 grid(num_ctas, ceil_div(params.num_tokens, params.tokens_per_chunk));
  params.rotations_per_warp = Traits::kComputed ? max_tokens_per_warp * (params.rope_dim / 2) : 0;
  const size_t smem_bytes = threads / 32 * params.rotations_per_warp * sizeof(float2);
  const auto kernel = vectorizable ? rope_kernel<Traits, kVecSize, 2> : rope_kernel<Traits, 1, 1>;
  return launch_kernel(kernel, grid, dim3(threads), smem_bytes, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
