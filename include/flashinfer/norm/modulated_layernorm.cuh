// Layer norm whose scale and shift are tensors, after a gated residual sum: the norms of diffusion
// transformers (W. Peebles, S. Xie, "Scalable Diffusion Models with Transformers", 2023).
//
//   h = residual + input * input_scale * (gate + gate_bias)      sum_out <- h, rounded
//   y = (h - mean(h)) * rsqrt(var(h) + eps)
//   normed_out = y * (1 + scale + scale_bias) + (shift + shift_bias), or y * gamma + beta
//
// A thread holds 16 bytes of a row, and its columns of the biases while the CTA goes through its
// rows. The next row's operands of the sum are in flight while a CTA reduces and writes the current
// one; scale and shift arrive during the reductions.
#pragma once

#include <flashinfer/collective/block_reduce.cuh>
#include <flashinfer/common/device_info.h>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/norm/modulated_layernorm_params.h>

namespace flashinfer {

// At most, one vector each; more would have too few registers.
inline constexpr uint32_t kModulatedThreads = 768;

template <typename T, bool kGate, bool kAffine>
__global__ void __launch_bounds__(kModulatedThreads)
    modulated_layernorm_kernel(const __grid_constant__ ModulatedLayernormParams params) {
  constexpr int kVecSize = 16 / sizeof(T);
  using Elements = Vector<T, kVecSize>;
  using Floats = Vector<float, kVecSize>;
  __shared__ float scratch[2][32];
  const uint32_t col = threadIdx.x * kVecSize;
  const bool is_valid = col < params.hidden_size;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const uint32_t all_rows = params.batch_size * params.num_rows;

  const auto row_of = [&](const BatchedRows& rows, uint32_t row) {
    return static_cast<const T*>(rows.data) + row / params.num_rows * rows.batch_stride +
           row % params.num_rows * rows.row_stride + col;
  };
  const auto load_columns = [&](const float* columns, float otherwise) {
    Floats values;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) values.elements[j] = otherwise;
    if (is_valid && columns != nullptr) values.load(columns + col);
    return values;
  };
  const Floats gate_bias = load_columns(params.gate_bias, 0.f);
  const Floats scale_bias = load_columns(params.scale_bias, 0.f);
  const Floats shift_bias = load_columns(params.shift_bias, 0.f);
  const float input_scale = params.input_scale == nullptr ? 1.f : *params.input_scale;
  const bool has_residual = params.residual.data != nullptr;

  Elements input = {}, residual = {}, gate = {};
  const auto load_row = [&](uint32_t row) {
    if (!is_valid || row >= all_rows) return;
    input.load_streaming(row_of(params.input, row));
    if (has_residual) residual.load_streaming(row_of(params.residual, row));
    if constexpr (kGate) gate.load(row_of(params.gate, row));
  };
  load_row(blockIdx.x);
  for (uint32_t row = blockIdx.x; row < all_rows; row += gridDim.x) {
    Elements scale = {}, shift = {};
    if constexpr (!kAffine) {
      if (is_valid) {
        scale.load(row_of(params.scale, row));
        shift.load(row_of(params.shift, row));
      }
    }
    float h[kVecSize], sum = 0.f;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      h[j] = input[j] * input_scale;
      if constexpr (kGate) h[j] *= gate[j] + gate_bias[j];
      h[j] += residual[j];
      sum += h[j];
    }
    load_row(row + gridDim.x);
    const float mean = block_reduce_sum(sum, scratch[0], num_warps) * params.inv_hidden_size;
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      squares += is_valid ? (h[j] - mean) * (h[j] - mean) : 0.f;
    }
    const float variance = block_reduce_sum(squares, scratch[1], num_warps);
    const float inv_std = rsqrtf(variance * params.inv_hidden_size + params.eps);
    float y[kVecSize];
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      y[j] = (h[j] - mean) * inv_std;
      y[j] = kAffine ? y[j] * scale_bias[j] + shift_bias[j]
                     : y[j] * (1.f + scale[j] + scale_bias[j]) + (shift[j] + shift_bias[j]);
    }
    if (!is_valid) continue;
    Elements rounded;
    rounded.from_floats(h);
    rounded.store(const_cast<T*>(row_of(params.sum_out, row)));
    rounded.from_floats(y);
    rounded.store(const_cast<T*>(row_of(params.normed_out, row)));
  }
}

#ifndef __CUDACC_RTC__

// hidden_size is whole vectors, at most kModulatedThreads of them.
template <typename T, bool kGate, bool kAffine>
inline cudaError_t launch_modulated_layernorm(ModulatedLayernormParams params,
                                              const DeviceInfo& device, cudaStream_t stream) {
  constexpr uint32_t kVecSize = 16 / sizeof(T);
  params.inv_hidden_size = 1.f / static_cast<float>(params.hidden_size);
  const uint32_t threads = round_up(params.hidden_size / kVecSize, 32u);
  const uint32_t all_rows = params.batch_size * params.num_rows;
  const uint32_t ctas = device.num_sms * (kModulatedThreads / threads);
  const uint32_t rows_per_cta = ceil_div(all_rows, ctas);
  return launch_kernel(modulated_layernorm_kernel<T, kGate, kAffine>,
                       dim3(ceil_div(all_rows, rows_per_cta)), dim3(threads), 0, stream, false,
                       params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
