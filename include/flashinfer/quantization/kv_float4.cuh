// Appends to 4-bit caches (NVFP4) and reads them back; a thread has a block of 16 elements.
//
//   scale = amax / 6 / global scale, in e4m3;  code = x / (scale * global scale), in e2m1
//   x = code * scale * global scale
//
// The arithmetic of a block is that of group_scale.cuh. Grid (blocks of all tokens, K and V).
#pragma once

#include <flashinfer/collective/group_max.cuh>
#include <flashinfer/common/float4_pairs.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/layout/page_table.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/quantization/group_scale.cuh>
#include <flashinfer/quantization/kv_float4_params.h>

namespace flashinfer {

inline constexpr int kFloat4Threads = 256;
inline constexpr int kFloat4Block = 16;

namespace detail {

__device__ __forceinline__ float global_scale_of(const Float4Operand& operand) {
  return operand.global_scale != nullptr ? *operand.global_scale : operand.global_value;
}

// Codes and scales of a block of a row.
struct Float4Place {
  uint8_t* codes;
  uint8_t* scale;

  __device__ __forceinline__ Float4Place(const Float4Cache& cache, int64_t page, int64_t slot,
                                         uint32_t head, uint32_t block)
      : codes(cache.codes + page * cache.codes_stride_page + slot * cache.codes_stride_slot +
              head * cache.codes_stride_head + block * (kFloat4Block / 2)),
        scale(cache.scales + page * cache.scales_stride_page + slot * cache.scales_stride_slot +
              head * cache.scales_stride_head + block) {}
};

__device__ __forceinline__ PageSlot append_slot(const Float4AppendParams& params, uint32_t token) {
  if (params.slots == nullptr) return find_slot(params.table, token);
  const int64_t slot = params.has_wide_slots ? static_cast<const int64_t*>(params.slots)[token]
                                             : static_cast<const int32_t*>(params.slots)[token];
  const uint32_t page_size = params.table.page_size.divisor;
  PageSlot result{0, 0, false};
  if (slot < 0 || slot >= int64_t{params.table.num_pages} * page_size) return result;
  result.page = static_cast<uint32_t>(slot / page_size);
  result.slot = static_cast<uint32_t>(slot - int64_t{result.page} * page_size);
  result.exists = true;
  return result;
}

}  // namespace detail

template <typename T>
__global__ void __launch_bounds__(kFloat4Threads)
    kv_float4_append_kernel(const __grid_constant__ Float4AppendParams params) {
  const uint32_t item = blockIdx.x * kFloat4Threads + threadIdx.x;
  const Float4Operand& operand = params.operands[blockIdx.y];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (item >= params.num_items) return;
  const uint32_t row = params.blocks.divide(item);
  const uint32_t block = item - row * params.blocks.divisor;
  const uint32_t token = params.heads.divide(row);
  const uint32_t head = row - token * params.heads.divisor;
  const PageSlot slot = detail::append_slot(params, token);
  if (!slot.exists) return;

  Vector<T, kFloat4Block> x;
  x.load(static_cast<const T*>(operand.rows.data) + token * operand.rows.stride_token +
         head * operand.rows.stride_head + block * kFloat4Block);
  MagnitudeMax<T> magnitude;
  magnitude.include(x);
  const float amax = magnitude.template reduce<1>();
  const auto scale = scale::e4m3::of<code::e2m1>(amax, 0.f, 1.f / detail::global_scale_of(operand));
  float scaled[kFloat4Block];
#pragma unroll
  for (int i = 0; i < kFloat4Block; ++i) scaled[i] = scale.template apply<T>(x[i]);
  CodeVector<code::e2m1, kFloat4Block> codes;
  codes.from_floats(scaled);
  const detail::Float4Place place(operand.cache, slot.page, slot.slot, head, block);
  *reinterpret_cast<uint2*>(place.codes) = codes.word;
  *place.scale = scale.stored;
}

// Tokens from a request's length on, and those of pages that do not exist, stay as they are.
template <typename T>
__global__ void __launch_bounds__(kFloat4Threads)
    kv_float4_gather_kernel(const __grid_constant__ Float4GatherParams params) {
  const uint32_t item = blockIdx.x * kFloat4Threads + threadIdx.x;
  const Float4Operand& operand = params.operands[blockIdx.y];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (item >= params.num_items[blockIdx.y]) return;
  const FastDivisor& blocks = params.blocks[blockIdx.y];
  const uint32_t row = blocks.divide(item);
  const uint32_t block = item - row * blocks.divisor;
  const uint32_t token = params.heads.divide(row);
  const uint32_t head = row - token * params.heads.divisor;
  const uint32_t request = params.max_len.divide(token);
  const uint32_t position = token - request * params.max_len.divisor;
  uint32_t page = 0, slot = position;
  if (params.seq_lens != nullptr && static_cast<int>(position) >= params.seq_lens[request]) return;
  if (params.block_tables != nullptr) {
    const uint32_t entry = params.page_size.divide(position);
    if (entry >= params.max_pages) return;
    page = static_cast<uint32_t>(params.block_tables[request * params.table_stride + entry]);
    if (page >= params.num_pages) return;
    slot = position - entry * params.page_size.divisor;
  }

  const detail::Float4Place place(operand.cache, page, slot, head, block);
  const uint2 words = *reinterpret_cast<const uint2*>(place.codes);
  const float scale = to_float(dtype::float8_e4m3fn{*place.scale}) * kE2m1Unit<dtype::float16>;
  const float global = detail::global_scale_of(operand);
  float values[kFloat4Block];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    uint32_t pairs[4];
    e2m1_to_pairs<dtype::float16>(w == 0 ? words.x : words.y, pairs);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const auto value = [&](uint32_t bits) {
        return to_float(dtype::float16{static_cast<uint16_t>(bits)}) * scale * global;
      };
      values[8 * w + p] = value(pairs[p]);
      values[8 * w + p + 4] = value(pairs[p] >> 16);
    }
  }
  Vector<T, kFloat4Block> out;
  out.from_floats(values);
  out.store(static_cast<T*>(operand.rows.data) + token * operand.rows.stride_token +
            head * operand.rows.stride_head + block * kFloat4Block);
}

#ifndef __CUDACC_RTC__

template <typename T>
inline cudaError_t launch_kv_float4_append(const Float4AppendParams& params, bool enable_pdl,
                                           cudaStream_t stream) {
  const dim3 grid(ceil_div<uint32_t>(params.num_items, kFloat4Threads), 2);
  return launch_kernel(kv_float4_append_kernel<T>, grid, dim3(kFloat4Threads), 0, stream,
                       enable_pdl, params);
}

template <typename T>
inline cudaError_t launch_kv_float4_gather(const Float4GatherParams& params, bool enable_pdl,
                                           cudaStream_t stream) {
  const auto [k, v] = params.num_items;
  const uint32_t num_items = k > v ? k : v;
  const dim3 grid(ceil_div<uint32_t>(num_items, kFloat4Threads), params.num_operands);
  return launch_kernel(kv_float4_gather_kernel<T>, grid, dim3(kFloat4Threads), 0, stream,
                       enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
