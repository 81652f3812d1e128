// What is done with a row of the sum while a CTA holds it: nothing, or the residual's addition, RMS
// norm and quantisation of the normed row.
//
//   h = sum + residual_in                                   residual_out <- h, rounded
//   y = h * rsqrt(mean(h^2) + eps) * (weight + weight_bias)   norm_out <- y, rounded
//   codes of the rounded y                                  quant_out, scale_out
//
// The sum is rounded to the dtype first, so that fusing changes no bit of it.
#pragma once

#include <flashinfer/collective/block_reduce.cuh>
#include <flashinfer/collective/group_max.cuh>
#include <flashinfer/comm/row_input.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/quantization/group_scale.cuh>
#include <flashinfer/quantization/scale_layout.h>

namespace flashinfer {

namespace row_output {

struct sum {
  static constexpr bool kNorm = false;
};
struct norm {
  static constexpr bool kNorm = true, kCodes = false;
};
// e4m3 codes of y / scale, with a scale that the caller gives.
struct static_e4m3 {
  static constexpr bool kNorm = true, kCodes = true;
  static constexpr int kGroupSize = 0;
};
// e4m3 codes with the scale max|y| / 448 of each row.
struct row_e4m3 {
  static constexpr bool kNorm = true, kCodes = true;
  static constexpr int kGroupSize = -1;
};
// e2m1 codes with an e4m3 scale for 16 elements.
template <typename Layout_>
struct nvfp4 {
  static constexpr bool kNorm = true, kCodes = true;
  static constexpr int kGroupSize = 16;
  using Layout = Layout_;
};
using nvfp4_linear = nvfp4<layout::linear>;
using nvfp4_128x4 = nvfp4<layout::swizzled_128x4>;
using nvfp4_8x4 = nvfp4<layout::swizzled_8x4>;

}  // namespace row_output

namespace detail {

// Largest of x over a CTA of whole warps; NaN exceeds everything. x is not negative.
__device__ __forceinline__ float block_max(float x, uint32_t* scratch) {
  const uint32_t lane_idx = threadIdx.x % 32, num_warps = blockDim.x / 32;
  uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(x));
  if (lane_idx == 0) scratch[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = __reduce_max_sync(0xffffffffu, lane_idx < num_warps ? scratch[lane_idx] : 0u);
  return __uint_as_float(bits);
}

}  // namespace detail

// The finishing of one row by a CTA whose threads hold kVecs vectors each, threadIdx.x apart.
template <typename T_, typename Output, int kVecs>
class RowOutput {
 public:
  using T = T_;
  static constexpr int kVecSize = 16 / sizeof(T);
  using Vec = Vector<T, kVecSize>;

  // Loads what does not depend on other ranks, before they are waited for.
  __device__ __forceinline__ void prepare(const AllReduceParams& params, uint32_t row) {
    if constexpr (Output::kNorm) {
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        residual_[i].clear();
        const uint32_t vec = threadIdx.x + i * blockDim.x;
        if (vec < params.row_vecs) {
          residual_[i] = row_input::load_vec<T>(params.residual_in,
                                                static_cast<int64_t>(row) * params.row_vecs + vec);
        }
      }
    }
  }

  // All threads call; `sums` of vectors beyond the row are zero. Calls for consecutive rows
  // alternate `parity`.
  __device__ __forceinline__ void finish(const AllReduceParams& params, uint32_t row,
                                         const Vec (&sums)[kVecs], uint32_t parity) {
    const int64_t first = static_cast<int64_t>(row) * params.row_vecs;
    const auto is_valid = [&](int i) {
      const uint32_t vec = threadIdx.x + i * blockDim.x;
      return vec < params.row_vecs && first + vec < params.total_vecs;
    };
    const auto place = [&](void* tensor, int i) {
      return static_cast<T*>(tensor) + (first + threadIdx.x + i * blockDim.x) * kVecSize;
    };
    if (params.sum_out != nullptr) {
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        if (is_valid(i)) sums[i].store(place(params.sum_out, i));
      }
    }
    if constexpr (Output::kNorm) {
      float h[kVecs][kVecSize], sum_of_squares = 0.f;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) {
          h[i][j] = sums[i][j] + residual_[i][j];
          sum_of_squares += h[i][j] * h[i][j];
        }
        if (params.residual_out != nullptr && is_valid(i)) {
          Vec rounded;
          rounded.from_floats(h[i]);
          rounded.store(place(params.residual_out, i));
        }
      }
      __shared__ float scratch[2][32];
      sum_of_squares =
          block_reduce_sum(sum_of_squares, scratch[parity], static_cast<int>(blockDim.x) / 32);
      const float inv_rms = rsqrtf(sum_of_squares * params.inv_hidden + params.eps);
      Vec normed[kVecs];
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        Vec weight;
        weight.clear();
        if (is_valid(i)) {
          weight = row_input::load_vec<T>(params.weight, threadIdx.x + i * blockDim.x);
        }
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) h[i][j] *= inv_rms * (weight[j] + params.weight_bias);
        normed[i].from_floats(h[i]);
        if (params.norm_out != nullptr && is_valid(i)) normed[i].store(place(params.norm_out, i));
      }
      if constexpr (Output::kCodes) quantize(params, row, normed, parity, is_valid);
    }
  }

 private:
  template <typename IsValid>
  __device__ __forceinline__ void quantize(const AllReduceParams& params, uint32_t row,
                                           const Vec (&normed)[kVecs], uint32_t parity,
                                           const IsValid& is_valid) {
    const int64_t first = static_cast<int64_t>(row) * params.row_vecs;
    float given = params.scale_value;
    if (params.scale != nullptr) given = *params.scale;
    if constexpr (Output::kGroupSize == 16) {
      constexpr int kLanes = 16 / kVecSize;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        MagnitudeMax<T> magnitude;
        magnitude.include(normed[i]);
        const auto scale =
            scale::e4m3::of<code::e2m1>(magnitude.template reduce<kLanes>(), 0.f, given);
        if (!is_valid(i)) continue;
        const uint32_t vec = threadIdx.x + i * blockDim.x;
        const uint32_t groups =
            round_up(params.row_vecs / kLanes, uint32_t{Output::Layout::kTileCols});
        if (vec % kLanes == 0) {
          static_cast<uint8_t*>(
              params.scale_out)[Output::Layout::offset(row, vec / kLanes, groups, 0)] =
              scale.stored;
        }
        store_codes<code::e2m1>(params, first + vec, normed[i],
                                [&](float y) { return scale.template apply<T>(y); });
      }
    } else {
      float inverse = 1.f / given;
      if constexpr (Output::kGroupSize == -1) {
        __shared__ uint32_t scratch[2][32];
        MagnitudeMax<T> magnitude;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) magnitude.include(normed[i]);
        const float amax = detail::block_max(magnitude.template reduce<1>(), scratch[parity]);
        const float row_scale = fmaxf(amax, 1e-10f) / code::e4m3::kMax;
        if (threadIdx.x == 0) static_cast<float*>(params.scale_out)[row] = row_scale;
        inverse = 1.f / row_scale;
      }
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        if (!is_valid(i)) continue;
        store_codes<code::e4m3>(params, first + threadIdx.x + i * blockDim.x, normed[i],
                                [&](float y) { return y * inverse; });
      }
    }
  }

  template <typename Code, typename Scaled>
  __device__ __forceinline__ static void store_codes(const AllReduceParams& params, int64_t vec,
                                                     const Vec& normed, const Scaled& scaled) {
    CodeVector<Code, kVecSize> codes;
    float y[kVecSize];
    normed.to_floats(y);
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) y[j] = scaled(y[j]);
    codes.from_floats(y);
    static_cast<decltype(codes.word)*>(params.quant_out)[vec] = codes.word;
  }

  Vec residual_[kVecs];
};

}  // namespace flashinfer
