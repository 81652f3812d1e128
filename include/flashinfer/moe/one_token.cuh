// The experts of one token, bfloat16 or float16, with a gate by SiLU: two kernels that read the
// chosen experts' weights once, without tensor cores and without a map of rows.
//
//   up      a warp has a row of the values and one of the gates, for one element between the
//           products: hidden[j, i] = silu(gate) * value, rounded
//   down    a warp has an element of the result: the sum over choices j of weights[j] times the
//           product of hidden[j] with a row of expert j, in float32, rounded once
//
// Lanes have 16 bytes each of 256 neighbouring elements, and kLoads such steps are on their way.
// The second kernel knows the experts before the first one ends, and loads its first weights then.
//
// Measurements, also of what lost: docs/tuning/moe.md.
#pragma once

#include <cstdint>
#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/common/set_shared.h>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/moe/moe_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename T_, typename Index_>
struct MoeTokenTraits {
  using T = T_;
  using Index = Index_;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtas = 4;  // of an SM
  static constexpr int kWide = 8;  // elements of a lane
  static constexpr int kStep = 32 * kWide;
  static constexpr int kUpLoads = 8;     // steps, of two rows each
  static constexpr int kDownLoads = 12;  // steps of one row
};

namespace detail {

// 256 elements of a row of the second weights.
struct alignas(16) MoeTokenStep {
  int64_t offset;  // of the row of element 0 of the result, in elements
  uint32_t left;   // elements that there are, 0 if the expert is elsewhere
  float weight;
};

struct MoeTokenChoice {
  int32_t experts[kMoeMaxChoices];  // their numbers here, or -1
  float weights[kMoeMaxChoices];
};

// Into shared memory; a barrier must follow.
template <typename Traits>
__device__ __forceinline__ void moe_token_choice(const MoeTokenParams& params,
                                                 MoeTokenChoice& choice) {
  using Index = typename Traits::Index;
  if (threadIdx.x >= params.top_k) return;
  const int64_t number =
      static_cast<int64_t>(static_cast<const Index*>(params.experts)[threadIdx.x]) -
      params.first_expert;
  const bool is_here = number >= 0 && number < params.num_experts;
  choice.experts[threadIdx.x] = is_here ? static_cast<int32_t>(number) : -1;
  choice.weights[threadIdx.x] = params.weights[threadIdx.x];
}

template <typename T>
__device__ __forceinline__ float dot(const Vector<T, 8>& a, const float (&x)[8], float sum) {
  float w[8];
  a.to_floats(w);
#pragma unroll
  for (int e = 0; e < 8; ++e) sum = fmaf(x[e], w[e], sum);
  return sum;
}

}  // namespace detail

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    moe_token_up_kernel(const __grid_constant__ MoeTokenParams params) {
  using T = typename Traits::T;
  constexpr int kWide = Traits::kWide, kLoads = Traits::kUpLoads, kStep = Traits::kStep;
  extern __shared__ __align__(128) char up_shared[];
  T* const row =
      reinterpret_cast<T*>(up_shared);  // [chunks][kLoads * kStep], zero beyond the token
  __shared__ detail::MoeTokenChoice choice;

  const uint32_t lane = threadIdx.x % 32;
  const uint32_t chunks = ceil_div<uint32_t>(params.size, kLoads * kStep);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  // Token and experts are on their way together.
  constexpr uint32_t kPass = kWide * Traits::kThreads, kFirst = 2 * kPass;
  const auto token_part = [&](uint32_t at) {
    Vector<T, kWide> x;
    x.clear();
    if (at < params.size) x.load(static_cast<const T*>(params.x) + at);
    return x;
  };
  const uint32_t own = kWide * threadIdx.x;
  const Vector<T, kWide> first = token_part(own), second = token_part(own + kPass);
  detail::moe_token_choice<Traits>(params, choice);
  static_assert(kFirst <= kLoads * kStep, "a chunk has both");
  first.store(row + own);
  second.store(row + own + kPass);
  for (uint32_t at = own + kFirst; at < chunks * kLoads * kStep; at += kPass) {
    token_part(at).store(row + at);
  }
  __syncthreads();

  const uint32_t units = params.top_k * params.inner;
  const uint32_t warps = gridDim.x * Traits::kWarps;
  uint32_t unit = blockIdx.x * Traits::kWarps + threadIdx.x / 32;
  if (unit >= units) return;

  // A part of two rows is loaded next.
  const int64_t to_gates = static_cast<int64_t>(params.inner) * params.size;
  const T* next = nullptr;
  uint32_t next_unit = unit, next_chunk = 0, next_left = 0;
  const auto locate = [&] {
    next_left = 0;
    if (next_unit >= units) return;
    const uint32_t number = next_unit / params.inner;
    const int32_t expert = choice.experts[number];
    if (expert < 0) return;
    const uint32_t column = next_chunk * kLoads * kStep + lane * kWide;
    next = static_cast<const T*>(params.fc1) + 2 * expert * to_gates +
           static_cast<int64_t>(next_unit - number * params.inner) * params.size + column;
    next_left = column < params.size ? params.size - column : 0;
  };
  Vector<T, kWide> values[kLoads], gates[kLoads];
  const auto load = [&](int i) {
    values[i].clear();
    gates[i].clear();
    if (i * kStep < next_left) {
      values[i].load_streaming(next + i * kStep);
      gates[i].load_streaming(next + to_gates + i * kStep);
    }
  };
  const auto advance = [&] {
    if (++next_chunk == chunks) {
      next_chunk = 0;
      next_unit += warps;
    }
    locate();
  };
  locate();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) load(i);

  for (; unit < units; unit += warps) {
    float value = 0.f, gate = 0.f;
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
      advance();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        Vector<T, kWide> part;
        part.load(row + (chunk * kLoads + i) * kStep + lane * kWide);
        float x[kWide];
        part.to_floats(x);
        value = detail::dot(values[i], x, value);
        gate = detail::dot(gates[i], x, gate);
        load(i);
      }
    }
    value = warp_reduce_sum(value);
    gate = warp_reduce_sum(gate);
    if (lane == 0) {
      static_cast<T*>(params.hidden)[unit] = from_float<T>(gate / (1.f + expf(-gate)) * value);
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    moe_token_down_kernel(const __grid_constant__ MoeTokenParams params) {
  using T = typename Traits::T;
  using Step = detail::MoeTokenStep;
  constexpr int kWide = Traits::kWide, kLoads = Traits::kDownLoads, kStep = Traits::kStep;
  extern __shared__ __align__(128) char down_shared[];
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t parts = ceil_div<uint32_t>(params.inner, kStep), steps = params.top_k * parts;
  const uint32_t filled = ceil_div<uint32_t>(steps, kLoads) * kLoads;
  Step* const table = reinterpret_cast<Step*>(down_shared);  // [filled]
  T* const rows = reinterpret_cast<T*>(table + filled);  // [filled][kStep], zero beyond each row

  // The kernel before has waited for what wrote experts and weights.
  __shared__ detail::MoeTokenChoice choice;
  detail::moe_token_choice<Traits>(params, choice);
  __syncthreads();
  for (uint32_t s = threadIdx.x; s < filled; s += Traits::kThreads) {
    Step step = {0, 0, 0.f};
    if (s < steps) {
      const uint32_t number = s / parts, column = (s - number * parts) * kStep;
      const int32_t expert = choice.experts[number];
      if (expert >= 0) {
        step.offset = static_cast<int64_t>(expert) * params.size * params.inner + column;
        step.left = min(params.inner - column, static_cast<uint32_t>(kStep));
        step.weight = choice.weights[number];
      }
    }
    table[s] = step;
  }
  __syncthreads();

  const uint32_t warps = gridDim.x * Traits::kWarps;
  uint32_t element = blockIdx.x * Traits::kWarps + threadIdx.x / 32;
  Vector<T, kWide> loaded[kLoads];
  const auto load = [&](int i, uint32_t s, uint32_t element) {
    loaded[i].clear();
    if (element >= params.size) return;
    const Step step = table[s];
    if (lane * kWide < step.left) {
      loaded[i].load_streaming(static_cast<const T*>(params.fc2) + step.offset +
                               static_cast<int64_t>(element) * params.inner + lane * kWide);
    }
  };
#pragma unroll
  for (int i = 0; i < kLoads; ++i) load(i, i, element);

  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  // Several parts of the rows are on their way at once.
  constexpr uint32_t kPass = kWide * Traits::kThreads, kPasses = 6;
  for (uint32_t begin = kWide * threadIdx.x; begin < filled * kStep; begin += kPasses * kPass) {
    Vector<T, kWide> x[kPasses];
#pragma unroll
    for (uint32_t i = 0; i < kPasses; ++i) {
      const uint32_t at = begin + i * kPass, s = at / kStep, number = s / parts;
      x[i].clear();
      if (at < filled * kStep && at % kStep < table[s].left) {
        const uint32_t column = at - number * parts * kStep;
        x[i].load(static_cast<const T*>(params.hidden) + number * params.inner + column);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kPasses; ++i) {
      const uint32_t at = begin + i * kPass;
      if (at < filled * kStep) x[i].store(rows + at);
    }
  }
  __syncthreads();

  for (; element < params.size; element += warps) {
    float total = 0.f;
    for (uint32_t first = 0; first < filled; first += kLoads) {
      const bool is_last = first + kLoads == filled;
      const uint32_t next = is_last ? 0 : first + kLoads;
      const uint32_t next_element = is_last ? element + warps : element;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        Vector<T, kWide> part;
        part.load(rows + (first + i) * kStep + lane * kWide);
        float x[kWide];
        part.to_floats(x);
        total = fmaf(table[first + i].weight, detail::dot(loaded[i], x, 0.f), total);
        load(i, next + i, next_element);
      }
    }
    total = warp_reduce_sum(total);
    if (lane == 0) static_cast<T*>(params.out)[element] = from_float<T>(total);
  }
}

#ifndef __CUDACC_RTC__

namespace detail {

template <typename Traits>
inline cudaError_t launch_moe_token_kernel(void (*kernel)(MoeTokenParams), uint32_t warps,
                                           uint32_t bytes, const MoeTokenParams& params,
                                           uint32_t num_sms, bool enable_pdl, cudaStream_t stream) {
  const cudaError_t error = set_shared(reinterpret_cast<const void*>(kernel), bytes, Traits::kCtas);
  if (error != cudaSuccess) return error;
  const uint32_t needed = ceil_div<uint32_t>(warps, Traits::kWarps), most = Traits::kCtas * num_sms;
  return launch_kernel(kernel, dim3(needed < most ? needed : most), dim3(Traits::kThreads), bytes,
                       stream, enable_pdl, params);
}

}  // namespace detail

// Sizes are multiples of 8, rows begin at multiples of 16 bytes.
template <typename Traits>
inline cudaError_t launch_moe_token(const MoeTokenParams& params, uint32_t num_sms, bool enable_pdl,
                                    cudaStream_t stream) {
  using T = typename Traits::T;
  constexpr uint32_t kChunk = Traits::kUpLoads * Traits::kStep;
  const uint32_t row = ceil_div<uint32_t>(params.size, kChunk) * kChunk;
  const cudaError_t error = detail::launch_moe_token_kernel<Traits>(
      moe_token_up_kernel<Traits>, params.top_k * params.inner, row * sizeof(T), params, num_sms,
      enable_pdl, stream);
  if (error != cudaSuccess) return error;
  const uint32_t steps = params.top_k * ceil_div<uint32_t>(params.inner, Traits::kStep);
  const uint32_t filled = ceil_div<uint32_t>(steps, Traits::kDownLoads) * Traits::kDownLoads;
  const uint32_t bytes = filled * (sizeof(detail::MoeTokenStep) + Traits::kStep * sizeof(T));
  return detail::launch_moe_token_kernel<Traits>(moe_token_down_kernel<Traits>, params.size, bytes,
                                                 params, num_sms, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
