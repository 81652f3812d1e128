// Quantisation in groups: each run of kGroupSize elements of a row shares one scale, computed from
// its largest magnitude.
//
//   y = input, or silu(input[:, :n]) * input[:, n:] rounded to the input's type
//   scale(row, group) and out = codes of y / scale: see group_scale.cuh
//
// The lanes that share a group each hold a part of it in registers and combine their maxima by
// shuffles. Groups follow each other through the grid, including those of the layout's padding,
// which have scale 0 and no codes.
//
// Measurements, also of what lost: docs/tuning/quantization.md.
#pragma once

#include <flashinfer/activation/activation.cuh>
#include <flashinfer/collective/group_max.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/quantization/group_quant_params.h>
#include <flashinfer/quantization/group_scale.cuh>
#include <flashinfer/quantization/scale_layout.h>

namespace flashinfer {

template <typename T_, typename Code_, typename Scale_, typename Layout_, int kGroupSize_,
          bool kSiluAndMul_>
struct GroupQuantTraits {
  using T = T_;
  using Code = Code_;
  using Scale = Scale_;
  using Layout = Layout_;
  static constexpr int kGroupSize = kGroupSize_;
  static constexpr bool kSiluAndMul = kSiluAndMul_;
  static constexpr int kVecSize = 16 / sizeof(T);
  // A lane takes a chunk of two adjacent vectors, or of four for 4-bit codes, which need more
  // instructions. More elements then share the cost of a group, and codes leave in wider stores.
  // The chunk is one vector if a group has an odd number of them.
  static constexpr int kMostVecs = Code::kBits == 4 ? 4 : 2;
  static constexpr int kChunkVecs = kGroupSize % (kMostVecs * kVecSize) == 0 ? kMostVecs
                                    : kGroupSize % (2 * kVecSize) == 0       ? 2
                                                                             : 1;
  static constexpr int kChunkSize = kChunkVecs * kVecSize;
  static constexpr int kChunks = kGroupSize / kChunkSize;
  // The largest power of two that divides the number of chunks, at most the size of a warp.
  static constexpr int kLanes = kChunks % 32 == 0 ? 32 : kChunks & -kChunks;
  static constexpr int kChunksPerLane = kLanes == 0 ? 0 : kChunks / kLanes;
  // If a thread would hold too much, the kernel that reads the group twice serves the size.
  static constexpr bool kFitsRegisters =
      kGroupSize % kVecSize == 0 && kChunksPerLane * kChunkVecs <= 4;
  // A lane takes two adjacent groups if a group is only half of what a lane can hold and the two
  // scales are adjacent.
  static constexpr bool kPairs = Code::kBits == 4 && kGroupSize * sizeof(T) == 32 && !kSiluAndMul &&
                                 sizeof(typename Scale::Stored) == 1 &&
                                 !std::is_same_v<Layout, layout::column_major>;
};

namespace detail {

template <typename Traits, int N>
__device__ __forceinline__ Vector<typename Traits::T, N> load_group_values(
    const GroupQuantParams& params, int64_t row_start, uint32_t col) {
  using T = typename Traits::T;
  const T* input = static_cast<const T*>(params.input) + row_start + col;
  Vector<T, N> x;
  x.load(input);
  if constexpr (Traits::kSiluAndMul) {
    Vector<T, N> up;
    up.load(input + params.num_cols);
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = act::silu::apply<sizeof(T) == 4>(x[i]) * up[i];
    x.from_floats(y);
  }
  return x;
}

template <typename Traits>
__device__ __forceinline__ float global_scale_of(const GroupQuantParams& params) {
  if constexpr (!Traits::Scale::kTakesGlobal) return 1.f;
  const float global = params.global_scale ? *params.global_scale : 1.f;
  return params.invert_global_scale ? 1.f / global : global;
}

template <typename Traits>
__device__ __forceinline__ void store_scale(const GroupQuantParams& params, uint32_t row,
                                            uint32_t group, typename Traits::Scale::Stored value) {
  const int64_t offset = Traits::Layout::offset(row, group, params.scale_cols, params.scale_stride);
  static_cast<typename Traits::Scale::Stored*>(params.scale)[offset] = value;
}

struct GroupPlace {
  uint32_t row;
  uint32_t group;
  bool exists;   // is part of this launch
  bool has_row;  // otherwise its scale is layout padding

  __device__ __forceinline__ GroupPlace(const GroupQuantParams& params, uint32_t index) {
    const uint32_t launch_row = params.divide_by_scale_cols.divide(index);
    row = params.first_row + launch_row;
    group = index - launch_row * params.scale_cols;
    exists = index < params.num_groups;
    has_row = exists && row < params.num_rows;
  }
};

// A grid whose next one waits for it before it reads what any grid writes lets that one take its
// place on the SMs at once.
__device__ __forceinline__ void begin_group_quant(const GroupQuantParams& params) {
  if (params.launches_early) ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
}

}  // namespace detail

template <typename Traits>
__global__ void __launch_bounds__(256)
    group_quant_kernel(const __grid_constant__ GroupQuantParams params) {
  using T = typename Traits::T;
  constexpr int kLanes = Traits::kLanes;
  constexpr int kChunksPerLane = Traits::kChunksPerLane;
  constexpr int kChunkSize = Traits::kChunkSize;
  using Codes = CodeVector<typename Traits::Code, kChunkSize>;
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t index = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const detail::GroupPlace place(params, index);

  detail::begin_group_quant(params);
  Vector<T, kChunkSize> x[kChunksPerLane];
  const float global = detail::global_scale_of<Traits>(params);
  const uint32_t first_chunk = place.group * Traits::kChunks + lane;  // of the row
#pragma unroll
  for (int i = 0; i < kChunksPerLane; ++i) {
    x[i].clear();
    if (place.has_row && place.group * Traits::kGroupSize < params.num_cols) {
      x[i] = detail::load_group_values<Traits, kChunkSize>(params, place.row * params.input_stride,
                                                           (first_chunk + i * kLanes) * kChunkSize);
    }
  }
  MagnitudeMax<T> magnitude;
#pragma unroll
  for (int i = 0; i < kChunksPerLane; ++i) magnitude.include(x[i]);
  const float amax = magnitude.template reduce<kLanes>();
  const auto scale = Traits::Scale::template of<typename Traits::Code>(amax, params.eps, global);
  const bool has_codes = place.has_row && place.group * Traits::kGroupSize < params.out_cols;
  if (lane == 0 && place.exists) {
    detail::store_scale<Traits>(params, place.row, place.group, has_codes ? scale.stored : 0);
  }
  if (!has_codes) return;
  const uint64_t chunks_per_row = params.out_cols / kChunkSize;
  auto* out =
      static_cast<typename Codes::Word*>(params.out) + (place.row * chunks_per_row + first_chunk);
#pragma unroll
  for (int i = 0; i < kChunksPerLane; ++i) {
    float scaled[kChunkSize];
    x[i].to_floats(scaled);
#pragma unroll
    for (int j = 0; j < kChunkSize; ++j) scaled[j] = scale.template apply<T>(scaled[j]);
    Codes codes;
    codes.from_floats(scaled);
    out[i * kLanes] = codes.word;
  }
}

// Kernel with two groups per thread, which share the work of locating them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kGroupPairCtas = 8;
#else
inline constexpr int kGroupPairCtas = 12;
#endif

template <typename Traits>
__global__ void __launch_bounds__(128, kGroupPairCtas)
    group_pair_quant_kernel(const __grid_constant__ GroupQuantParams params) {
  using T = typename Traits::T;
  constexpr int kSize = Traits::kGroupSize;
  using Codes = CodeVector<typename Traits::Code, kSize>;
  static_assert(sizeof(Codes) == 8, "two of them are one store");
  const detail::GroupPlace place(params, 2 * (blockIdx.x * blockDim.x + threadIdx.x));
  const uint32_t first_col = place.group * kSize;
  const bool has_codes = place.has_row && first_col < params.out_cols;

  detail::begin_group_quant(params);
  Vector<T, kSize> x[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t col = first_col + i * kSize;
    x[i].clear();
    if (place.has_row && col < params.num_cols) {
      x[i] = detail::load_group_values<Traits, kSize>(params, place.row * params.input_stride, col);
    }
  }
  const float global = detail::global_scale_of<Traits>(params);
  Codes codes[2];
  uint32_t scales = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    MagnitudeMax<T> magnitude;
    magnitude.include(x[i]);
    const auto scale = Traits::Scale::template of<typename Traits::Code>(
        magnitude.template reduce<1>(), params.eps, global);
    scales |= static_cast<uint32_t>(scale.stored) << (8 * i);
    float scaled[kSize];
    x[i].to_floats(scaled);
#pragma unroll
    for (int j = 0; j < kSize; ++j) scaled[j] = scale.template apply<T>(scaled[j]);
    codes[i].from_floats(scaled);
  }
  if (!place.exists) return;
  const int64_t offset =
      Traits::Layout::offset(place.row, place.group, params.scale_cols, params.scale_stride);
  *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(params.scale) + offset) =
      static_cast<uint16_t>(has_codes ? scales : 0);
  if (!has_codes) return;
  const int64_t pair = (place.row * uint64_t{params.out_cols} + first_col) / (2 * kSize);
  static_cast<uint4*>(params.out)[pair] =
      make_uint4(codes[0].word.x, codes[0].word.y, codes[1].word.x, codes[1].word.y);
}

// Kernel for any group size and alignment. A warp reads its group twice by single elements. 4-bit
// codes come in pairs.
template <typename Traits>
__global__ void __launch_bounds__(256)
    group_quant_elementwise_kernel(const __grid_constant__ GroupQuantParams params) {
  using T = typename Traits::T;
  constexpr int kStep = Traits::Code::kBits == 4 ? 2 : 1;  // elements per store
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const detail::GroupPlace place(params, index);
  const uint32_t first_col = place.group * Traits::kGroupSize;
  const bool has_codes = place.has_row && first_col < params.out_cols;
  const bool has_input = place.has_row && first_col < params.num_cols;
  const int64_t row_start = place.row * params.input_stride;
  const auto load = [&](uint32_t i) {
    Vector<T, 1> x{};
    if (has_input && i < Traits::kGroupSize) {
      x = detail::load_group_values<Traits, 1>(params, row_start, first_col + i);
    }
    return x;
  };

  detail::begin_group_quant(params);
  MagnitudeMax<T> magnitude;
  for (uint32_t i = lane; i < Traits::kGroupSize; i += 32) magnitude.include(load(i));
  const float amax = magnitude.template reduce<32>();
  const auto scale = Traits::Scale::template of<typename Traits::Code>(
      amax, params.eps, detail::global_scale_of<Traits>(params));
  if (lane == 0 && place.exists) {
    detail::store_scale<Traits>(params, place.row, place.group, has_codes ? scale.stored : 0);
  }
  if (!has_codes) return;
  auto* out = static_cast<uint8_t*>(params.out) +
              (static_cast<int64_t>(place.row) * params.out_cols + first_col) / kStep;
  for (uint32_t i = lane * kStep; i < Traits::kGroupSize; i += 32 * kStep) {
    const float pair[2] = {scale.template apply<T>(load(i)[0]),
                           kStep == 2 ? scale.template apply<T>(load(i + 1)[0]) : 0.f};
    CodeVector<typename Traits::Code, 2> codes;
    codes.from_floats(pair);
    out[i / kStep] = static_cast<uint8_t>(codes.word);
  }
}

#ifndef __CUDACC_RTC__

// Launches over all of params.scale_rows, in as many grids as 31-bit group numbers need, and sets
// the fields of each launch.
template <typename Traits>
inline cudaError_t launch_group_quant(GroupQuantParams params, bool enable_pdl,
                                      cudaStream_t stream) {
  constexpr uint32_t kThreads = Traits::Code::kBits == 4 ? 128 : 256;
  void (*kernel)(GroupQuantParams) = group_quant_elementwise_kernel<Traits>;
  uint32_t groups_per_cta = kThreads / 32;
  if constexpr (Traits::kFitsRegisters) {
    if (params.vectorizable) {
      kernel = group_quant_kernel<Traits>;
      groups_per_cta = kThreads / Traits::kLanes;
      if constexpr (Traits::kPairs) {
        // The codes and scales of two groups are whole words.
        if (params.out_cols % (2 * Traits::kGroupSize) == 0 && params.scale_cols % 2 == 0 &&
            reinterpret_cast<uintptr_t>(params.scale) % 2 == 0) {
          kernel = group_pair_quant_kernel<Traits>;
          groups_per_cta = 2 * kThreads;
        }
      }
    }
  }
  params.divide_by_scale_cols = FastDivisor(params.scale_cols);
  const uint32_t max_rows = INT32_MAX / params.scale_cols;
  for (uint32_t first = 0; first < params.scale_rows; first += max_rows) {
    const uint32_t rows =
        params.scale_rows - first < max_rows ? params.scale_rows - first : max_rows;
    params.first_row = first;
    params.num_groups = rows * params.scale_cols;
    const uint32_t ctas = ceil_div(params.num_groups, groups_per_cta);
    const cudaError_t status =
        launch_kernel(kernel, dim3(ctas), dim3(kThreads), 0, stream, enable_pdl, params);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
