// Host side of the attention kernel for Hopper.
//
// Measurements, also of what lost: docs/tuning/attention_sm90_items.md.
#pragma once

#include <flashinfer/attention/finalize.cuh>
#include <flashinfer/attention/sm90/attention.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/ptx/tensor_map.h>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Describes a tensor in boxes of 128 bytes of columns. `box_rows` stays 0 if the copy engine cannot
// describe it; threads then copy it.
template <typename T, int kDims>
inline void encode_map(TensorMap& map, const void* data, uint64_t columns,
                       const ptx::TensorMapDim (&dims)[kDims], uint32_t box_rows) {
  const bool is_encoded =
      box_rows != 0 && ptx::encode_tensor_map<T>(map.map, data, columns, 128 / sizeof(T), dims);
  map.box_rows = is_encoded ? box_rows : 0;
}

// Rows of a K or V tile that one box covers: whole groups of eight rows within a page. A tile
// begins at a multiple of the largest power of two that divides its size.
template <typename Tile>
inline uint32_t kv_box_rows(uint32_t page_size, bool paged) {
  constexpr uint32_t kTile = Tile::kTileKV, kStep = kTile & -kTile;
  if (!paged) return kTile;
  if (page_size % kStep == 0) return kStep;
  return page_size % 8 == 0 && kStep % page_size == 0 ? page_size : 0;
}

template <typename Traits, typename Params>
inline void encode_maps(HopperParams<Params>& hopper) {
  using Tile = typename Traits::Tile;
  const Params& params = hopper.attention;
  const AttentionTensors& t = params.tensors[0];
  const uint32_t heads = params.num_kv_heads.divisor, group = params.group_size.divisor;
  encode_map<typename Tile::Q>(
      hopper.q, t.q, Tile::kHeadDimQK,
      {{uint64_t{heads} * group, t.q_stride_head, group},
       {static_cast<uint64_t>(t.num_qo_tokens), t.q_stride_token, Tile::kTileQ / group}},
      Tile::kTileQ % group == 0 ? Tile::kTileQ : 0);
  // A box holds a warp's 16 rows: whole head groups, or some heads of one group.
  const ptx::TensorMapDim box_heads = {uint64_t{heads} * group, t.o_stride_head,
                                       group < 16 ? group : 16};
  const ptx::TensorMapDim box_tokens = {static_cast<uint64_t>(t.num_qo_tokens), t.o_stride_token,
                                        group < 16 ? 16 / group : 1};
  const uint32_t box_rows = 16 % group == 0 || group % 16 == 0 ? 16 : 0;
  if constexpr (kStoresOneBox<Tile>) {
    constexpr int kChunks = Tile::kHeadDimVO / 64;
    encode_map<typename Tile::O>(hopper.o, t.o, 64, {box_heads, box_tokens, {kChunks, 64, kChunks}},
                                 box_rows);
  } else {
    encode_map<typename Tile::O>(hopper.o, t.o, Tile::kHeadDimVO, {box_heads, box_tokens},
                                 box_rows);
  }
  const uint32_t page_size = params.page_size.divisor;
  const uint32_t rows = kv_box_rows<Tile>(page_size, Traits::kPaged);
  const auto encode_kv = [&](TensorMap& map, const void* data, auto dim, int64_t page,
                             int64_t token, int64_t head) {
    constexpr int kColumns = dim.value;
    using KV = typename Tile::KV;
    if constexpr (HopperRows<Traits, kColumns>::kByPage) {
      // A box holds groups of eight tokens by chunks of 64 columns. Five dimensions leave one for
      // heads and pages together.
      const int64_t unit = heads == 1 ? page : head;
      map.page_units = unit > 0 && page % unit == 0 ? static_cast<uint32_t>(page / unit) : 0;
      const uint64_t units = uint64_t{map.page_units} * (t.num_pages + 1);
      encode_map<KV>(map, data, 64,
                     {{8, token, 8},
                      {kColumns / 64, 64, kColumns / 64},
                      {page_size / 8, 8 * token, rows / 8},
                      {uint64_t{map.page_units} * t.num_pages, unit, 1}},
                     0 < units && units < (1u << 31) ? rows : 0);
    } else if constexpr (Traits::kPaged) {
      encode_map<KV>(map, data, kColumns,
                     {{page_size, token, rows}, {heads, head, 1}, {t.num_pages, page, 1}}, rows);
    } else {
      encode_map<KV>(map, data, kColumns,
                     {{static_cast<uint64_t>(t.num_kv_tokens), token, rows}, {heads, head, 1}},
                     rows);
    }
  };
  const std::integral_constant<int, Tile::kHeadDimQK> dim_qk;
  const std::integral_constant<int, Tile::kHeadDimVO> dim_vo;
  encode_kv(hopper.k, t.k, dim_qk, t.k_stride_page, t.k_stride_token, t.k_stride_head);
  encode_kv(hopper.v, t.v, dim_vo, t.v_stride_page, t.v_stride_token, t.v_stride_head);
}

// Returns the number of SMs of the current device, which must be a Hopper GPU, and raises the
// kernel's shared-memory limit once per device.
template <typename Traits, typename Params>
inline cudaError_t prepare_hopper_attention(int* num_sms) {
  return once_per_device(num_sms, [](int device, int* count) {
    const cudaError_t status = cudaFuncSetAttribute(hopper_attention_kernel<Traits, Params>,
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    kHopperSharedBytes<typename Traits::Tile>);
    if (status != cudaSuccess) return status;
    return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  });
}

// Number of heads whose lists are dealt together, the longest list first. Heads are dealt together
// until they have at least three lists per SM, so that CTAs end at about the same time.
template <typename Params>
inline uint32_t heads_together(const Params& params, uint32_t num_sms) {
  const uint32_t heads = params.num_kv_heads.divisor;
  uint32_t together = 1;
  while (together < heads && together * params.num_ctas.divisor < 3 * num_sms) together *= 2;
  return heads % together == 0 ? together : heads;
}

template <typename Traits, typename Params>
inline cudaError_t launch_hopper_attention(const Params& params, bool enable_pdl,
                                           cudaStream_t stream) {
  using Tile = typename Traits::Tile;
  int num_sms = 0;
  cudaError_t status = prepare_hopper_attention<Traits, Params>(&num_sms);
  if (status != cudaSuccess) return status;
  HopperParams<Params> hopper;
  hopper.attention = params;
  encode_maps<Traits>(hopper);
  const uint32_t num_lists = params.num_ctas.divisor * params.num_kv_heads.divisor;
  // With many lists per SM the CTAs end together in any order, so the order keeps K and V of the
  // active heads in L2.
  hopper.heads_first = num_lists < 8u * num_sms;
  hopper.heads_together =
      hopper.heads_first ? params.num_kv_heads.divisor : heads_together(params, num_sms);
  const dim3 grid(num_lists < static_cast<uint32_t>(num_sms) ? num_lists : num_sms);
  status = launch_kernel(hopper_attention_kernel<Traits, Params>, grid, dim3(Tile::kThreads),
                         kHopperSharedBytes<Tile>, stream, enable_pdl, hopper);
  if (status != cudaSuccess) return status;
  return launch_merge<typename Traits::Variant, typename Tile::O, Tile::kHeadDimVO>(
      params, enable_pdl, stream);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
