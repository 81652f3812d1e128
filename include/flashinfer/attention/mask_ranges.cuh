// Finds the first and the last key that each query sees by a custom mask, so that a plan leaves out
// the tiles of keys before and after them.
#pragma once

#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/mask_ranges_params.h>
#include <flashinfer/attention/request_of.cuh>
#include <flashinfer/common/launch.cuh>

namespace flashinfer {

inline constexpr int kMaskRangesWarps = 8;

// Grid (ceil(num_queries / kMaskRangesWarps)): a warp reads the mask of one query.
__global__ void __launch_bounds__(32 * kMaskRangesWarps)
    mask_ranges_kernel(const __grid_constant__ MaskRangesParams params) {
  const int query = blockIdx.x * kMaskRangesWarps + threadIdx.x / 32;
  if (query >= params.num_queries) return;
  if (query < params.qo_indptr[0]) {  // before the first request
    if (threadIdx.x % 32 == 0) params.ranges[query] = {0, 0};
    return;
  }
  const int request = request_of(params.qo_indptr, params.batch_size, query);
  const int kv_len = params.kv_len[request];
  const uint8_t* const mask = params.mask + params.mask_indptr[request];
  const int64_t first_bit = int64_t{query - params.qo_indptr[request]} * kv_len;
  int begin = kv_len, end = 0;
  for (int key = threadIdx.x % 32 * 32; key < kv_len; key += 32 * 32) {
    const uint32_t word = mask_bits(mask, first_bit + key, min(32, kv_len - key));
    if (word == 0) continue;
    begin = min(begin, key + __ffs(static_cast<int>(word)) - 1);
    end = key + 32 - __clz(static_cast<int>(word));
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    begin = min(begin, __shfl_xor_sync(0xffffffffu, begin, offset));
    end = max(end, __shfl_xor_sync(0xffffffffu, end, offset));
  }
  if (threadIdx.x % 32 == 0) params.ranges[query] = {min(begin, end), end};
}

#ifndef __CUDACC_RTC__

inline cudaError_t launch_mask_ranges(const MaskRangesParams& params, cudaStream_t stream) {
  const unsigned ctas = (params.num_queries + kMaskRangesWarps - 1) / kMaskRangesWarps;
  return launch_kernel(mask_ranges_kernel, dim3(ctas), dim3(32 * kMaskRangesWarps), 0, stream,
                       false, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
