// Gated residual norm of rows, and the norm that follows it:
//
//   b = branch * (post_weight + post_center)            or the branch itself
//   out = alpha * residual + beta * b * rsqrt(mean(b^2) + post_eps)
//   normed_out = out * rsqrt(mean(out^2) + next_eps) * (next_weight + next_center)
//
// A thread holds 16 bytes of the branch's row. Its columns of the gates stay in registers while the
// CTA goes through its rows: they would otherwise be as many bytes as the rows. The weights, half
// as many, are read again from L1; registers for them too would spill. The loads of the next row
// are in flight while a CTA reduces and writes the current one.
#pragma once

#include <flashinfer/collective/block_reduce.cuh>
#include <flashinfer/common/device_info.h>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/norm/gated_residual_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

inline constexpr uint32_t kGatedResidualThreads = 1024;  // at most, one vector each

// With kNext, the next norm's result is written as well.
template <typename T, bool kNext>
__global__ void __launch_bounds__(kGatedResidualThreads)
    gated_residual_kernel(const __grid_constant__ GatedResidualParams params) {
  constexpr int kVecSize = 16 / sizeof(T);
  using Elements = Vector<T, kVecSize>;
  using Floats = Vector<float, kVecSize>;
  __shared__ float scratch[2][32];
  const uint32_t col = threadIdx.x * kVecSize;
  const bool is_valid = col < params.hidden_size;
  const int num_warps = static_cast<int>(blockDim.x) / 32;

  // What no earlier kernel writes while the layer runs is still read after the wait: gates may be
  // results as well.
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  Floats alpha, beta = {};
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) alpha.elements[j] = params.alpha_value;
  if (is_valid) {
    if (params.alpha != nullptr) alpha.load(params.alpha + col);
    beta.load(params.beta + col);
  }
  Elements branch = {};
  Floats residual = {};
  const auto load_row = [&](uint32_t row) {
    if (!is_valid || row >= params.num_rows) return;
    branch.load_streaming(static_cast<const T*>(params.branch) + row * params.branch_stride + col);
    residual.load_streaming(params.residual + row * params.residual_stride + col);
  };

  load_row(blockIdx.x);
  // Reductions take turns with the scratch arrays, so that one barrier each is enough.
  int turn = 0;
  for (uint32_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    float b[kVecSize], sum = 0.f;
    branch.to_floats(b);
    Elements weight = {};
    if (is_valid && params.post_weight != nullptr) {
      weight.load(static_cast<const T*>(params.post_weight) + col);
    }
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      if (params.post_weight != nullptr) b[j] *= weight[j] + params.post_center;
      sum += b[j] * b[j];
    }
    const Floats stream = residual;
    load_row(row + gridDim.x);
    sum = block_reduce_sum(sum, scratch[turn], num_warps);
    turn ^= 1;
    const float inv_rms = rsqrtf(sum * params.inv_hidden_size + params.post_eps);
    float total = 0.f;
    Floats blended;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      blended.elements[j] = alpha[j] * stream[j] + beta[j] * (b[j] * inv_rms);
      total += blended[j] * blended[j];
    }
    if (is_valid) blended.store(params.out + row * params.out_stride + col);
    if constexpr (kNext) {
      total = block_reduce_sum(total, scratch[turn], num_warps);
      turn ^= 1;
      const float next_rms = rsqrtf(total * params.inv_hidden_size + params.next_eps);
      if (is_valid) weight.load(static_cast<const T*>(params.next_weight) + col);
      float y[kVecSize];
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        y[j] = blended[j] * next_rms * (weight[j] + params.next_center);
      }
      Elements rounded;
      rounded.from_floats(y);
      if (is_valid) {
        rounded.store(static_cast<T*>(params.normed_out) + row * params.normed_stride + col);
      }
    }
  }
}

#ifndef __CUDACC_RTC__

// hidden_size is whole vectors, at most kGatedResidualThreads of them.
template <typename T, bool kNext>
inline cudaError_t launch_gated_residual(GatedResidualParams params, const DeviceInfo& device,
                                         bool enable_pdl, cudaStream_t stream) {
  constexpr uint32_t kVecSize = 16 / sizeof(T);
  params.inv_hidden_size = 1.f / static_cast<float>(params.hidden_size);
  const uint32_t threads = round_up(params.hidden_size / kVecSize, 32u);
  // All CTAs are there at once and have the same number of rows, but for one.
  const uint32_t ctas = device.num_sms * (kGatedResidualThreads / threads);
  const uint32_t rows_per_cta = ceil_div(params.num_rows, ctas);
  return launch_kernel(gated_residual_kernel<T, kNext>,
                       dim3(ceil_div(params.num_rows, rows_per_cta)), dim3(threads), 0, stream,
                       enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
