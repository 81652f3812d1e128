// RMS norm per head and sigmoid gate, in place:
//
//   input = input * rsqrt(mean(input^2) + eps) * sigmoid(gate)
//
// A thread has 16 bytes; the adjacent lanes of a head reduce among themselves.
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/norm/sigmoid_gate_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

inline constexpr uint32_t kSigmoidGateThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kSigmoidGateThreads)
    sigmoid_gate_kernel(const __grid_constant__ SigmoidGateParams params) {
  constexpr int kVecSize = 16 / sizeof(T);
  const uint64_t i = uint64_t{blockIdx.x} * kSigmoidGateThreads + threadIdx.x;
  const uint32_t row = static_cast<uint32_t>(i / params.row_vecs);
  const uint32_t col = static_cast<uint32_t>(i % params.row_vecs) * kVecSize;
  // A warp stays whole for its reductions.
  const bool is_valid = row < params.num_rows;
  T* const input = static_cast<T*>(params.input) + row * params.input_stride + col;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  Vector<T, kVecSize> x = {}, gate = {};
  if (is_valid) {
    x.load_streaming(input);
    gate.load_streaming(static_cast<const T*>(params.gate) + row * params.gate_stride + col);
  }
  float values[kVecSize], sum = 0.f;
  x.to_floats(values);
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) sum += values[j] * values[j];
  sum = warp_reduce_sum(sum, static_cast<int>(params.lanes_per_head));
  const float inv_rms = rsqrtf(sum * params.inv_head_dim + params.eps);
#pragma unroll
  for (int j = 0; j < kVecSize; ++j) {
    values[j] = values[j] * inv_rms / (1.f + expf(-gate[j]));
  }
  x.from_floats(values);
  if (is_valid) x.store(input);
}

#ifndef __CUDACC_RTC__

template <typename T>
inline cudaError_t launch_sigmoid_gate(SigmoidGateParams params, bool enable_pdl,
                                       cudaStream_t stream) {
  params.inv_head_dim = 1.f / static_cast<float>(params.lanes_per_head * (16 / sizeof(T)));
  const uint64_t vecs = uint64_t{params.num_rows} * params.row_vecs;
  const auto ctas = static_cast<uint32_t>((vecs + kSigmoidGateThreads - 1) / kSigmoidGateThreads);
  return launch_kernel(sigmoid_gate_kernel<T>, dim3(ctas), dim3(kSigmoidGateThreads), 0, stream,
                       enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
