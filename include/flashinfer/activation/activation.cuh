// Gated activations: out[r, i] = act(input[r, i]) * input[r, hidden_size + i].
//
// A CTA covers consecutive vectors of one row (grid.x) and strides over rows (grid.y). Computed in
// float and rounded once.
//
// Measurements, also of what lost: docs/tuning/norm.md.
#pragma once

#include <flashinfer/activation/activation_params.h>
#include <flashinfer/common/exp2.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

namespace act {

// 1 / (1 + exp(-x)). 16-bit results use the approximate exponential and division (relative error <
// 2^-20); with the exact ones instructions rather than memory would limit the kernel.
template <bool kExact>
__device__ __forceinline__ float sigmoid(float x) {
  // exp(-|x|) cannot overflow, so the left tail keeps its relative accuracy.
  const float t = kExact ? expf(-fabsf(x)) : __expf(-fabsf(x));
  const float numerator = x < 0.f ? t : 1.f;
  if constexpr (kExact) return numerator / (1.f + t);
  // The divisor is between 1 and 2: the division intrinsic would handle a range that is not needed.
  return numerator * math::ptx_rcp(1.f + t);
}

// erfc(z) for z >= 0 with a relative error of 1.2e-7 plus that of the approximate exponential: the
// Chebyshev fit of W. Press et al., "Numerical Recipes", section 6.2. erfcf takes twice the
// instructions and makes the kernel 1.6 times as slow.
__device__ __forceinline__ float erfc_positive(float z) {
  const float t = __fdividef(2.f, 2.f + z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  return t * __expf(p - z * z);
}

struct silu {
  template <bool kExact>
  __device__ __forceinline__ static float apply(float x) {
    return x * sigmoid<kExact>(x);
  }
};

// SiLU for an 8-bit result in half the instructions: results below 2^-120 become 0.
__device__ __forceinline__ float silu_for_8_bits(float x) {
  return x * math::ptx_rcp(1.f + math::ptx_exp2(x * -math::log2e));
}

// x * Phi(x)
struct gelu {
  template <bool kExact>
  __device__ __forceinline__ static float apply(float x) {
    // erfc keeps the relative accuracy of the left tail, where 1 + erf cancels.
    constexpr float kInvSqrt2 = 0.70710678118654752f;
    if constexpr (kExact) return 0.5f * x * erfcf(-x * kInvSqrt2);
    const float tail = 0.5f * erfc_positive(fabsf(x) * kInvSqrt2);
    return x * (x < 0.f ? tail : 1.f - tail);
  }
};

// 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct gelu_tanh {
  template <bool kExact>
  __device__ __forceinline__ static float apply(float x) {
    constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
    return x * sigmoid<kExact>(kTwoSqrt2OverPi * x * (1.f + 0.044715f * x * x));
  }
};

}  // namespace act

template <typename T, typename Activation, int kVecSize, int kVecsPerThread>
__global__ void __launch_bounds__(256)
    act_and_mul_kernel(const __grid_constant__ ActAndMulParams params) {
  constexpr bool kExact = sizeof(T) == 4;
  const uint32_t num_vecs = params.hidden_size / kVecSize;
  const uint32_t first_vec = blockIdx.x * (blockDim.x * kVecsPerThread) + threadIdx.x;
  ptx::grid_launch_and_wait();
  for (uint32_t row = blockIdx.y; row < params.num_rows; row += gridDim.y) {
    const T* gate = static_cast<const T*>(params.input) + row * params.input_stride;
    const T* up = gate + params.hidden_size;
    T* out = static_cast<T*>(params.out) + row * params.out_stride;
    Vector<T, kVecSize> g[kVecsPerThread], u[kVecsPerThread];
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      const uint32_t vec_idx = first_vec + i * blockDim.x;
      if (vec_idx < num_vecs) {
        g[i].load(gate + vec_idx * kVecSize);
        u[i].load(up + vec_idx * kVecSize);
      }
    }
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      const uint32_t vec_idx = first_vec + i * blockDim.x;
      if (vec_idx < num_vecs) {
        float y[kVecSize];
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) {
          y[j] = Activation::template apply<kExact>(g[i][j]) * u[i][j];
        }
        Vector<T, kVecSize> y_out;
        y_out.from_floats(y);
        y_out.store(out + vec_idx * kVecSize);
      }
    }
  }
}

#ifndef __CUDACC_RTC__

template <typename T, typename Activation>
inline cudaError_t launch_act_and_mul(const ActAndMulParams& params, bool enable_pdl,
                                      cudaStream_t stream) {
  constexpr int kVecSize = 16 / sizeof(T);
  constexpr uint32_t kMaxGridY = 65535;
  constexpr uint32_t kThreads = 256;
  const uint32_t grid_y = params.num_rows < kMaxGridY ? params.num_rows : kMaxGridY;
  const auto grid_x = [&](uint32_t per_thread) {
    return ceil_div(params.hidden_size, kThreads * per_thread);
  };
  if (params.vectorizable) {
    return launch_kernel(act_and_mul_kernel<T, Activation, kVecSize, 1>,
                         dim3(grid_x(kVecSize), grid_y), dim3(kThreads), 0, stream, enable_pdl,
                         params);
  }
  return launch_kernel(act_and_mul_kernel<T, Activation, 1, 4>, dim3(grid_x(4), grid_y),
                       dim3(kThreads), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
