// Rotary position embedding (Su et al., "RoFormer", 2021), out of place or in place, with an
// optional 8-bit result and an optional paged cache as the destination of K and V:
//
//   (x_a, x_b) <- (x_a cos - x_b sin, x_b cos + x_a sin)        angle = position * frequency_j
//
// Pair j is (x_j, x_{j + rope_dim / 2}), or (x_{2j}, x_{2j + 1}) when interleaved. A thread takes
// kVecSize pairs, which is two vectors of a head, of one or several heads of one token: the angles
// are the same for all heads. threadIdx.x runs over the pairs of a head, threadIdx.y over heads,
// threadIdx.z over tokens. Each element is read and written by one thread, after all of that
// thread's reads: the kernel works in place.
#pragma once

#include <flashinfer/common/head_grid.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/layout/page_table.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/rope/rope_params.h>
#include <type_traits>

namespace flashinfer {

// TCache: element type of the cache of cosines and sines; void: angles are computed.
template <typename T_, typename TOut_, typename TCache_, bool kInterleave_, bool kAppend_>
struct RopeTraits {
  using T = T_;
  using TOut = TOut_;
  using TCache = TCache_;
  static constexpr bool kComputed = std::is_void_v<TCache>;
  static constexpr bool kInterleave = kInterleave_;
  static constexpr bool kAppend = kAppend_;
  static constexpr bool kScaleOutput = dtype::kIsFloat8<TOut>;
  using Params = std::conditional_t<kComputed, ComputedRopeParams, RopeParams>;
};

namespace detail {

// What a thread does of a head: two vectors, `first` and `second` elements into the rotated or the
// copied part.
struct RopeUnit {
  uint32_t first, second;
  bool rotates, has_first, has_second;
};

template <typename Traits, int kVecSize>
__device__ __forceinline__ RopeUnit rope_unit(const RopeOperand& operand, uint32_t x) {
  const uint32_t num_rotated = operand.rope_dim / (2 * kVecSize);
  if (x < num_rotated) {
    const uint32_t first = Traits::kInterleave ? 2 * x * kVecSize : x * kVecSize;
    return {first, Traits::kInterleave ? first + kVecSize : first + operand.rope_dim / 2, true,
            true, true};
  }
  const uint32_t num_vecs = operand.copy_dim / kVecSize;
  const uint32_t num_copied = (num_vecs + 1) / 2;
  const uint32_t first = x - num_rotated, second = first + num_copied;
  return {first * kVecSize, second * kVecSize, false, first < num_copied, second < num_vecs};
}

// Sequence position of a token given by pos_ids, or by the request it belongs to. A token of no
// request is at position 0, where the rotation is the identity.
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

// Number of entries of indptr[1 .. batch_size] that are at most `token`: the request of `token`, or
// batch_size. For the whole CTA at once.
__device__ __forceinline__ uint32_t request_of(const RopeParams& params, uint32_t token,
                                               uint32_t thread, uint32_t num_threads) {
  uint32_t count = 0;
  for (uint32_t first = 0; first < params.batch_size; first += num_threads) {
    const uint32_t i = first + thread;
    count += __syncthreads_count(i < params.batch_size &&
                                 params.indptr[i + 1] <= static_cast<int32_t>(token));
  }
  return count;
}

template <int kVecSize>
struct Rotation {
  float cos[kVecSize], sin[kVecSize];
};

// Pairs first_pair ... of the row of a position; NaN outside the cache, so that a bad position
// cannot go unnoticed.
template <typename TCache, int kVecSize>
__device__ __forceinline__ void load_rotation(const RopeParams& params, int64_t position,
                                              uint32_t num_pairs, uint32_t first_pair,
                                              Rotation<kVecSize>& rotation) {
  if (static_cast<uint64_t>(position) >= static_cast<uint64_t>(params.cache_rows)) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j)
      rotation.cos[j] = rotation.sin[j] = __uint_as_float(0x7fc00000u);
    return;
  }
  const TCache* row =
      static_cast<const TCache*>(params.cos_sin_cache) + position * params.cos_sin_stride;
  Vector<TCache, kVecSize> cos, sin;
  cos.load(row + first_pair);
  sin.load(row + num_pairs + first_pair);
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) {
    rotation.cos[j] = cos[j];
    rotation.sin[j] = sin[j];
  }
}

// Cosines and sines of the CTA's tokens, [blockDim.z][num_pairs]: each is needed by every head, so
// computed once.
__device__ __forceinline__ void compute_rotations(const ComputedRopeParams& params, uint32_t token,
                                                  uint32_t num_pairs, float2* table) {
  const uint32_t slice = blockDim.x * blockDim.y;
  const uint32_t thread_in_slice = threadIdx.y * blockDim.x + threadIdx.x;
  uint32_t request = 0;
  if (params.pos_ids == nullptr) {
    request = request_of(params, blockIdx.x * blockDim.z, threadIdx.z * slice + thread_in_slice,
                         slice * blockDim.z);
  }
  if (token < params.num_tokens) {
    const uint64_t position = static_cast<uint64_t>(rope_position(params, token, request));
    for (uint32_t pair = thread_in_slice; pair < num_pairs; pair += slice) {
      const uint64_t turn = position * params.frequencies.turns[pair];
      // The upper half as a signed number is in [-1/2, 1/2) turns, which is [-1, 1) pi.
      const float half_turns = static_cast<float>(static_cast<int32_t>(turn >> 32)) * 0x1p-31f;
      float2 cos_sin;
      sincospif(half_turns, &cos_sin.y, &cos_sin.x);
      table[threadIdx.z * num_pairs + pair] = cos_sin;
    }
  }
  __syncthreads();
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

template <typename T>
__device__ __forceinline__ T* rope_row(const RopeRows& rows, uint32_t token, uint32_t head) {
  return static_cast<T*>(rows.data) + token * rows.stride_token + head * rows.stride_head;
}

}  // namespace detail

template <typename Traits, int kVecSize, int kHeadsPerThread>
__global__ void __launch_bounds__(512)
    rope_kernel(const __grid_constant__ typename Traits::Params params) {
  using T = typename Traits::T;
  using TOut = typename Traits::TOut;
  extern __shared__ float2 rotations[];
  const uint32_t token = blockIdx.x * blockDim.z + threadIdx.z;
  const uint32_t num_pairs = params.operands[0].rope_dim / 2;
  uint32_t num_units = 0, num_heads = 0;
#pragma unroll
  for (const RopeOperand& operand : params.operands) {
    const uint32_t copied = (operand.copy_dim / kVecSize + 1) / 2;
    const uint32_t units = operand.rope_dim / (2 * kVecSize) + copied;
    num_units = units > num_units ? units : num_units;
    num_heads += operand.num_heads;
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if constexpr (Traits::kComputed) {
    detail::compute_rotations(params, token, num_pairs, rotations);
  }
  if (token >= params.num_tokens) return;

  // The operand that a head of the call belongs to, and the head's index there.
  const auto find_operand = [&](uint32_t& head) {
    int which = 0;
    while (which < 2 && head >= params.operands[which].num_heads) {
      head -= params.operands[which].num_heads;
      ++which;
    }
    return which;
  };
  const uint32_t first_head = blockIdx.y * blockDim.y * kHeadsPerThread + threadIdx.y;
  for (uint32_t x = threadIdx.x; x < num_units; x += blockDim.x) {
    Vector<T, kVecSize> a[kHeadsPerThread], b[kHeadsPerThread];
#pragma unroll
    for (int i = 0; i < kHeadsPerThread; ++i) {
      uint32_t head = first_head + i * blockDim.y;
      if (head >= num_heads) continue;
      const RopeOperand& operand = params.operands[find_operand(head)];
      const detail::RopeUnit unit = detail::rope_unit<Traits, kVecSize>(operand, x);
      const T* in =
          detail::rope_row<const T>(unit.rotates ? operand.rope_in : operand.copy_in, token, head);
      if (unit.has_first) a[i].load(in + unit.first);
      if (unit.has_second) b[i].load(in + unit.second);
    }

    detail::Rotation<kVecSize> rotation;
    const uint32_t first_pair = x * kVecSize;
    if (first_pair < num_pairs) {
      if constexpr (Traits::kComputed) {
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) {
          const float2 cos_sin = rotations[threadIdx.z * num_pairs + first_pair + j];
          rotation.cos[j] = cos_sin.x;
          rotation.sin[j] = cos_sin.y;
        }
      } else {
        detail::load_rotation<typename Traits::TCache>(
            params, detail::rope_position(params, token, 0), num_pairs, first_pair, rotation);
      }
    }
    PageSlot slot{0, 0, true};
    if constexpr (Traits::kAppend) slot = find_slot(params.table, token);

#pragma unroll
    for (int i = 0; i < kHeadsPerThread; ++i) {
      uint32_t head = first_head + i * blockDim.y;
      if (head >= num_heads) continue;
      const int which = find_operand(head);
      const RopeOperand& operand = params.operands[which];
      const detail::RopeUnit unit = detail::rope_unit<Traits, kVecSize>(operand, x);
      const RopeRows& rows = unit.rotates ? operand.rope_out : operand.copy_out;
      float y_a[kVecSize], y_b[kVecSize];
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        y_a[j] = a[i][j];
        y_b[j] = b[i][j];
      }
      if (unit.rotates) detail::rotate<Traits>(y_a, y_b, rotation);
      if constexpr (Traits::kScaleOutput) {
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) {
          y_a[j] *= operand.scale;
          y_b[j] *= operand.scale;
        }
      }
      TOut* out = detail::rope_row<TOut>(rows, token, head);
      if (Traits::kAppend && which != 0) {
        if (!slot.exists) continue;
        out = detail::rope_row<TOut>(rows, slot.slot, head) + slot.page * rows.stride_page;
      }
      Vector<TOut, kVecSize> out_a, out_b;
      out_a.from_floats(y_a);
      out_b.from_floats(y_b);
      if (unit.has_first) out_a.store(out + unit.first);
      if (unit.has_second) out_b.store(out + unit.second);
    }
  }
}

#ifndef __CUDACC_RTC__

// `vectorizable`: the parts of every head and the rows of the cos-sin cache are whole, aligned
// vectors.
template <typename Traits>
inline cudaError_t launch_rope(const typename Traits::Params& params, bool vectorizable,
                               bool enable_pdl, cudaStream_t stream) {
  constexpr int kVecSize = 16 / sizeof(typename Traits::T);
  constexpr int kHeadsPerThread = 1;
  constexpr uint32_t kThreads = 256;
  const uint32_t vec_size = vectorizable ? kVecSize : 1;
  uint32_t num_units = 0, num_heads = 0;
  for (const RopeOperand& operand : params.operands) {
    const uint32_t units =
        operand.rope_dim / (2 * vec_size) + ceil_div(operand.copy_dim / vec_size, 2u);
    num_units = units > num_units ? units : num_units;
    num_heads += operand.num_heads;
  }
  const HeadGrid shape = make_head_grid(
      params.num_tokens, ceil_div<uint32_t>(num_heads, kHeadsPerThread), num_units, kThreads);
  const size_t smem_bytes =
      Traits::kComputed ? shape.block.z * (params.operands[0].rope_dim / 2) * sizeof(float2) : 0;
  const auto kernel = vectorizable ? rope_kernel<Traits, kVecSize, kHeadsPerThread>
                                   : rope_kernel<Traits, 1, kHeadsPerThread>;
  return launch_kernel(kernel, shape.grid, shape.block, smem_bytes, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
