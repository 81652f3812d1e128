// Boxes of the copy engine by which kernels for Hopper bring KV: 128 bytes of some tokens of a
// page.
#pragma once

#include <flashinfer/mla/mla_params.h>
#include <flashinfer/ptx/tensor_map.h>

namespace flashinfer {

struct MlaSm90Params {
  MlaParams mla;
  ptx::EncodedTensorMap ckv, kpe;      // boxes of 128 bytes, or all of kpe, of `box_rows` tokens
  ptx::EncodedTensorMap q_nope, q_pe;  // boxes of 64 columns of 64 heads of a token; of pairs
  uint32_t box_rows;                   // 0: threads copy
};

// Pages of an item's next boxes: each lane holds those of one of 32 consecutive boxes, and of the
// 32 that follow.
struct MlaBoxPages {
  int first, next;

  // What the table says of a token, -1 where there is none.
  __device__ __forceinline__ static int entry_of(const MlaParams& params, const MlaWorkItem& item,
                                                 int token) {
    if (token >= item.kv_end) return -1;
    return params.kv_indices[item.kv_base + params.page_size.divide(token)];
  }

  // The page, or -1 if the cache has none of that number.
  __device__ __forceinline__ static int existing(const MlaParams& params, int page) {
    return static_cast<uint32_t>(page) < params.num_pages ? page : -1;
  }

  __device__ __forceinline__ static int page_of(const MlaParams& params, const MlaWorkItem& item,
                                                int token) {
    return existing(params, entry_of(params, item, token));
  }

  // Asks for them. Who needs them waits for them, in `of`.
  __device__ __forceinline__ static MlaBoxPages find(const MlaSm90Params& params,
                                                     const MlaWorkItem& item, int lane_idx) {
    const int box_rows = params.box_rows;
    return {entry_of(params.mla, item, item.kv_begin + lane_idx * box_rows),
            entry_of(params.mla, item, item.kv_begin + (32 + lane_idx) * box_rows)};
  }

  __device__ __forceinline__ MlaBoxPages of(const MlaParams& params) const {
    return {existing(params, first), existing(params, next)};
  }
};

#ifndef __CUDACC_RTC__

// Tokens of a box: the largest power of two from 16 to `most` that divides the page, or 0.
inline uint32_t mla_box_rows(uint32_t page_size, uint32_t most) {
  const uint32_t step = page_size & -page_size;
  return step < 16 ? 0 : step < most ? step : most;
}

// Describes a cache in boxes of `box_columns`, with a swizzle as long as these.
template <typename T>
inline void encode_mla_cache(MlaSm90Params& params, ptx::EncodedTensorMap& map,
                             const MlaCache& cache, uint64_t columns, uint32_t box_columns,
                             CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  if (columns == 0 || params.box_rows == 0) return;
  const uint32_t page_size = params.mla.page_size.divisor;
  const ptx::TensorMapDim dims[] = {{page_size, cache.stride_token, params.box_rows},
                                    {params.mla.num_pages, cache.stride_page, 1}};
  if (!ptx::encode_tensor_map<T>(map, cache.data, columns, box_columns, dims, swizzle)) {
    params.box_rows = 0;
  }
}

// Describes both caches of a tile to the copy engine; where it cannot read them, threads copy.
template <typename Tile>
inline void encode_mla_boxes(MlaSm90Params& params) {
  using Ckv = typename Tile::Ckv;
  using Kpe = typename Tile::Kpe;
  constexpr int kCkvColumns = 128 / static_cast<int>(sizeof(Ckv));
  constexpr bool kWideRope = sizeof(Kpe) == 2;
  encode_mla_cache<Ckv>(params, params.ckv, params.mla.ckv, Tile::kDimCkv, kCkvColumns);
  encode_mla_cache<Kpe>(params, params.kpe, params.mla.kpe, Tile::kDimKpe, 64,
                        kWideRope ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

// Describes queries of which each tile has 64 heads of a token. Returns whether the copy engine can
// read them.
template <typename Tile>
inline bool encode_mla_queries(MlaSm90Params& params) {
  const auto encode = [&](ptx::EncodedTensorMap& map, const MlaRows& rows, uint64_t columns) {
    return columns == 0 || ptx::encode_tensor_map<typename Tile::T>(
                               map, rows.data, columns, 64,
                               {{params.mla.num_heads.divisor, rows.stride_head, Tile::kRows},
                                {params.mla.num_tokens, rows.stride_token, 1}});
  };
  return encode(params.q_nope, params.mla.q_nope, Tile::kDimCkv) &&
         encode(params.q_pe, params.mla.q_pe, Tile::kDimKpe);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
